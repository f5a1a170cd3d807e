"""Attention modules of old families, which do not ask transformers' registry.

GPT-J, CodeGen, GPT-Neo and GPT-NeoX-Japanese compute attention in a method ``_attn`` of their
module. Falcon calls torch's scaled_dot_product_attention. Each module here asks the registry's
function instead, while its config names that attention; otherwise it computes as transformers does.
A family is served only if its logits equal those of ``generate`` (compare.py), as every other.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

Attention = Callable[..., tuple[torch.Tensor, None]]

SCALES: dict[str, Callable[[Any], float]] = {
    "CodeGenAttention": lambda module: 1.0 / float(module.scale_attn),
    "GPTJAttention": lambda module: 1.0 / float(module.scale_attn),
    "GPTNeoSelfAttention": lambda module: 1.0,
    "GPTNeoXJapaneseAttention": lambda module: 1.0 / float(module.norm_factor),
}
"""Classes whose ``_attn`` takes query, key and value [1, H, T, D], and what scales their scores."""

FALCON = "FalconAttention"


def redirect_attention(model: PreTrainedModel, name: str, attention: Attention) -> bool:
    """Makes such modules of ``model`` call ``attention`` while their config names it.

    Returns:
        Whether there are any.
    """
    found = False
    for module in model.modules():
        kind = type(module).__name__
        if kind in SCALES:
            _redirect_method(module, model.config, name, attention, SCALES[kind](module))
        elif kind == FALCON and not model.config.alibi:
            _redirect_torch(module, model.config, name, attention)
        else:
            continue
        found = True
    return found


def _redirect_method(
    module: Any, config: Any, name: str, attention: Attention, scale: float
) -> None:
    original = module._attn
    local = getattr(module, "attention_type", "") == "local"
    window: int | None = config.window_size if local else None

    def attend(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if config._attn_implementation != name:
            both: tuple[torch.Tensor, torch.Tensor] = original(query, key, value, attention_mask)
            return both
        # Rotary tables are fp32, and some of these families leave query and key so.
        query, key = query.to(value.dtype), key.to(value.dtype)
        out, _ = attention(self, query, key, value, None, scaling=scale, sliding_window=window)
        return out.transpose(1, 2), None

    module._attn = MethodType(attend, module)


class _Redirected(TorchFunctionMode):
    """Within it, torch's attention is that of a module."""

    def __init__(self, module: torch.nn.Module, attention: Attention) -> None:
        super().__init__()
        self._module = module
        self._attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        out, _ = self._attention(self._module, *args[:3], None)
        return out.transpose(1, 2).contiguous()


def _redirect_torch(module: Any, config: Any, name: str, attention: Attention) -> None:
    original = module.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation != name:
            return original(*args, **kwargs)
        # The module asks for torch's attention under this name alone.
        config._attn_implementation_internal = "sdpa"
        try:
            with _Redirected(self, attention):
                return original(*args, **kwargs)
        finally:
            config._attn_implementation_internal = name

    module.forward = MethodType(forward, module)
