"""Rayfin: large language models served as Ray actors."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "__version__",
    "connect",
]

if TYPE_CHECKING:
    from rayfin.actors.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from rayfin.actors.structured_outputs import StructuredOutputs, StructuredOutputsParams
    from rayfin.deployments.offline.async_llm import AsyncEngineArgs, AsyncLLM
    from rayfin.deployments.offline.connect import connect
    from rayfin.deployments.offline.llm import LLM
    from rayfin.deployments.offline.lora import LoRARequest
    from rayfin.deployments.offline.outputs import CompletionOutput, RequestOutput
    from rayfin.deployments.offline.pooling import PoolingParams

_HOMES = {
    "AsyncEngineArgs": "rayfin.deployments.offline.async_llm",
    "AsyncLLM": "rayfin.deployments.offline.async_llm",
    "BeamSearchParams": "rayfin.actors.sampling_params",
    "CompletionOutput": "rayfin.deployments.offline.outputs",
    "LLM": "rayfin.deployments.offline.llm",
    "LoRARequest": "rayfin.deployments.offline.lora",
    "PoolingParams": "rayfin.deployments.offline.pooling",
    "RequestOutput": "rayfin.deployments.offline.outputs",
    "RequestOutputKind": "rayfin.actors.sampling_params",
    "SamplingParams": "rayfin.actors.sampling_params",
    "StructuredOutputs": "rayfin.actors.structured_outputs",
    "StructuredOutputsParams": "rayfin.actors.structured_outputs",
    "connect": "rayfin.deployments.offline.connect",
}


def __getattr__(name: str) -> Any:
    """Loads the public classes on first use: `import rayfin` alone stays instant."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rayfin' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
