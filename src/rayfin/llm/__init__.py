"""The names of ``ray.serve.llm``, served by Rayfin: docs/from-ray.md."""

from typing import Any

from rayfin.deployments.rayllm.builders import (
    build_dp_deployment,
    build_dp_openai_app,
    build_llm_deployment,
    build_openai_app,
)
from rayfin.deployments.rayllm.config import (
    CloudMirrorConfig,
    LLMConfig,
    LLMServingArgs,
    LoraConfig,
    ModelLoadingConfig,
)

__all__ = [
    "CloudMirrorConfig",
    "LLMConfig",
    "LLMServingArgs",
    "LoraConfig",
    "ModelLoadingConfig",
    "build_dp_deployment",
    "build_dp_openai_app",
    "build_llm_deployment",
    "build_openai_app",
]

_MISSING = {
    "LLMServer": "the ingress and engines are Rayfin's own; --plugin route=... adds to the API",
    "OpenAiIngress": "the ingress and engines are Rayfin's own; --plugin route=... adds to the API",
    "build_pd_openai_app": "one engine does prefill and decode, in one step; build_openai_app",
}


def __getattr__(name: str) -> Any:
    """Says what works instead of a name of Ray's that is missing here."""
    if name in _MISSING:
        raise ImportError(f"rayfin.llm has no {name}: {_MISSING[name]}")
    raise AttributeError(f"module 'rayfin.llm' has no attribute {name!r}")
