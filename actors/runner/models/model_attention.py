"""Attention modules of old families, which do not ask transformers' registry.

GPT-J, CodeGen, GPT-Neo, GPT-NeoX-Japanese and the first GPT compute attention in a method ``_attn``
of their module. Falcon calls torch's scaled_dot_product_attention. BLOOM and MPT add a bias that
grows with the key's position (ALiBi, Press et al. 2022) and do the whole in ``forward``. Here, each
module asks the registry's function instead while its config names that attention. Otherwise it
computes as transformers does.
A family is served only if its logits equal those of ``generate`` (compare.py), as every other.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

Attention = Callable[..., tuple[torch.Tensor, None]]

SCALES: dict[str, Callable[[Any], float]] = {
    "CodeGenAttention": lambda module: 1.0 / float(module.scale_attn),
    "GPTJAttention": lambda module: 1.0 / float(module.scale_attn),
    "GPTNeoSelfAttention": lambda module: 1.0,
    "GPTNeoXJapaneseAttention": lambda module: 1.0 / float(module.norm_factor),
}
"""Classes whose ``_attn`` takes query, key and value [1, H, T, D], and what scales their scores."""

FIRST_GPT, FALCON, BLOOM, MPT = "Attention", "FalconAttention", "BloomAttention", "MptAttention"


def redirect_attention(model: PreTrainedModel, name: str, attention: Attention) -> bool:
    """Makes such modules of ``model`` call ``attention`` while their config names it.

    Returns:
        Whether there are any.
    """
    redirected = False
    modules: Iterator[Any] = iter(model.modules())
    for module in modules:
        kind = type(module).__name__
        if kind in SCALES and hasattr(module, "_attn"):  # transformers 5.24 redid GPT-J and CodeGen
            _redirect_method(module, model.config, name, attention, SCALES[kind](module))
        elif kind == FIRST_GPT and model.config.model_type == "openai-gpt":
            _redirect_first_gpt(module, model.config, name, attention)
        elif kind == FALCON and not model.config.alibi:
            _redirect_torch(module, model.config, name, attention)
        elif kind == BLOOM:
            slopes = build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)[:, 0, 1]
            _redirect_forward(module, model.config, name, partial(_bloom, attention, slopes))
        elif kind == MPT and model.config.attn_config.alibi:
            heads, bias_max = module.n_heads, model.config.attn_config.alibi_bias_max
            slopes = cast(Any, build_mpt_alibi_tensor)(heads, 2, bias_max).flatten(1).diff()[:, 0]
            _redirect_forward(module, model.config, name, partial(_mpt, attention, slopes))
        elif kind == "MptModel":
            module.register_forward_pre_hook(partial(_give_mask, name), with_kwargs=True)
        else:
            continue
        redirected = True
    return redirected


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
        out = attention(self, query, key, value, None, scaling=scale, sliding_window=window)[0]
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
        out = self._attention(self._module, *args[:3], None)[0]
        return out.transpose(1, 2).contiguous()


def _redirect_first_gpt(module: Any, config: Any, name: str, attention: Attention) -> None:
    original = module._attn

    def attend(
        self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
    ) -> list[torch.Tensor]:
        if config._attn_implementation != name:
            parts: list[torch.Tensor] = original(query, key, value, *rest)
            return parts
        scale = query.shape[-1] ** -0.5 if self.scale else 1.0
        keys = key.transpose(-1, -2)  # [1, H, T, D], as they came from before a product
        out = attention(self, query, keys, value, None, scaling=scale)[0]
        return [out.transpose(1, 2)]

    module._attn = MethodType(attend, module)


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


def _redirect_forward(
    module: Any, config: Any, name: str, paged: Callable[..., tuple[torch.Tensor, None]]
) -> None:
    original = module.forward

    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation != name:
            return original(hidden, *args, **kwargs)
        return paged(self, hidden, *args)

    module.forward = MethodType(forward, module)


def _bloom(
    attention: Attention,
    slopes: torch.Tensor,
    module: Any,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden))
    scale = module.inv_norm_factor
    out = attention(module, query, key, value, None, scaling=scale, slopes=slopes)[0]
    output: torch.Tensor = module.dense(out.flatten(2))
    return output + residual, None


def _give_mask(name: str, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """MPT's model converts its mask, even if it has none; this one is not read."""
    if module.config._attn_implementation == name:
        kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    return args, kwargs


def _mpt(
    attention: Attention, slopes: torch.Tensor, module: Any, hidden: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, None]:
    mixed = module.Wqkv(hidden)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = (*hidden.shape[:2], module.n_heads, module.head_dim)
    query, key, value = (part.reshape(heads).transpose(1, 2) for part in mixed.chunk(3, dim=2))
    scale = module.softmax_scale
    out = attention(module, query, key, value, None, scaling=scale, slopes=slopes)[0]
    output: torch.Tensor = module.out_proj(out.flatten(2))
    return output, None


SPLIT, PADDING = 256, 6
"""Positions are split at this number, so that bf16 pages hold both halves; and zeros, so that a
key's size stays a multiple of 8."""


def with_positions(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    slopes: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key [1, H, T, D + 8] whose products, scaled, have ``slopes`` [H] times the key's
    position added.

    A score that grows with the key's position is one that falls with the distance: what all scores
    of a query have in common does not change its softmax.
    """
    high, low = positions // SPLIT, positions % SPLIT
    tokens, heads = key.shape[2], key.shape[1]
    halves = torch.stack([high, low], dim=-1).to(key.dtype).expand(1, heads, tokens, 2)
    weights = (slopes.to(query) / scale)[None, :, None, None].expand(1, -1, tokens, 2)
    weights = weights * torch.tensor([SPLIT, 1], dtype=query.dtype, device=query.device)
    padding = key.new_zeros(1, heads, tokens, PADDING)
    return torch.cat([query, weights, padding], -1), torch.cat([key, halves, padding], -1)
