"""A model over the rows of a Ray Dataset: docs/batches.md."""

from rayfin.deployments.data.config import RayfinConfig
from rayfin.deployments.data.processor import Processor, RayfinRows, build_processor

__all__ = ["Processor", "RayfinConfig", "RayfinRows", "build_processor"]
