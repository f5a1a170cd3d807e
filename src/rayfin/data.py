"""A model over the rows of a Ray Dataset: docs/batches.md."""

from rayfin.deployments.data.config import RayfinConfig
from rayfin.deployments.data.processor import Processor, RayfinRows, build_processor
from rayfin.deployments.rayllm.config import vLLMEngineProcessorConfig

__all__ = [
    "Processor",
    "RayfinConfig",
    "RayfinRows",
    "build_processor",
    "vLLMEngineProcessorConfig",
]
