"""A model over the rows of a Ray Dataset: docs/batches.md."""

from rayfin.deployments.rayllm.config import vLLMEngineProcessorConfig
from rayfin.deployments.rayllm.data_config import RayfinConfig
from rayfin.deployments.rayllm.processor import Processor, RayfinRows, build_processor

__all__ = [
    "Processor",
    "RayfinConfig",
    "RayfinRows",
    "build_processor",
    "vLLMEngineProcessorConfig",
]
