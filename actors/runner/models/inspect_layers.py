"""Reads a decoder layer: its weights, and the order in which it applies them.

Layers are recognized by structure, not by the model's name. A module with an unexpected child is
rejected, since its effect is unknown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.quantized.linear import SmallLinear
from rayfin.kernels.cpu.experts import ClampedSwish

Linear = nn.Linear | SmallLinear

Bare = Callable[[Any], Any]
"""A module -> the share of a rank in it, which the module sums or gathers; else the module."""


@dataclass(frozen=True, slots=True)
class GatedParts:
    """The linear layers of a gated MLP."""

    gate_up: list[Linear]  # one merged, or two
    down: Linear


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer's modules. Norms run before (``_norm``) or after (``_out_norm``) their block."""

    attention: nn.Module
    query_key_value: list[Linear]  # one merged, or three
    attention_out: Linear
    mlp: GatedParts | nn.Module  # a module is a mixture of experts, called as it is
    attention_norm: nn.Module | None
    attention_out_norm: nn.Module | None
    mlp_norm: nn.Module | None
    mlp_out_norm: nn.Module | None
    query_norm: nn.Module | None
    key_norm: nn.Module | None


_NORMS = {
    # Gemma: before and after both blocks
    frozenset(
        (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    ): (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    # Llama and most others: before both
    frozenset(("input_layernorm", "post_attention_layernorm")): (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    ),
    # OLMo 2: after both
    frozenset(("post_attention_layernorm", "post_feedforward_layernorm")): (
        None,
        "post_attention_layernorm",
        None,
        "post_feedforward_layernorm",
    ),
}
_IDLE = (nn.Dropout, nn.Identity)


def itself(module: Any) -> Any:
    """Returns the module: it is ``Bare`` for a model that no ranks share."""
    return module


def inspect_layer(
    layer: nn.Module, experts: type[nn.Module] | None = None, bare: Bare = itself
) -> LayerParts:
    """The parts of a decoder layer. The MLP may be a mixture whose experts are of type ``experts``.

    Raises:
        UnrecognizedModule: The layer has other parts, or lacks some.
    """
    children = _children(layer)
    try:
        attention, mlp = children.pop("self_attn"), children.pop("mlp")
        names = _NORMS[frozenset(children)]
    except KeyError:
        raise UnrecognizedModule(
            f"{type(layer).__name__} has {', '.join(_children(layer))}"
        ) from None
    norms = [None if name is None else children[name] for name in names]
    projections = _children(attention, bare)
    query_norm, key_norm = projections.pop("q_norm", None), projections.pop("k_norm", None)
    return LayerParts(
        attention,
        _pop_linears(attention, projections, ("qkv_proj",), ("q_proj", "k_proj", "v_proj")),
        _pop_linears(attention, projections, ("o_proj",))[0],
        _read_mlp(mlp, experts, bare),
        attention_norm=norms[0],
        attention_out_norm=norms[1],
        mlp_norm=norms[2],
        mlp_out_norm=norms[3],
        query_norm=query_norm,
        key_norm=key_norm,
    )


def _read_mlp(
    mlp: nn.Module, experts: type[nn.Module] | None, bare: Bare
) -> GatedParts | nn.Module:
    inner = bare(mlp)
    if experts is not None and isinstance(bare(getattr(inner, "experts", None)), experts):
        return mlp
    gates = _children(inner, bare)
    for idle in ("act_fn", "activation_fn"):
        gates.pop(idle, None)
    gate_up = _pop_linears(mlp, gates, ("gate_up_proj",), ("gate_proj", "up_proj"))
    return GatedParts(gate_up, _pop_linears(mlp, gates, ("down_proj",))[0])


def is_linear(module: nn.Module | None) -> bool:
    """Whether it is a plain layer, or one of codes."""
    return type(module) is nn.Linear or isinstance(module, SmallLinear)


def is_experts(module: nn.Module) -> bool:
    """Whether its weights are gate and up projections [E, 2 F, H] and down projections [E, H, F].

    transformers has this layout in Mixtral, Qwen 2 and 3, OLMoE, DeepSeek, Granite and others.
    """
    weights = dict(module.named_parameters(recurse=False))
    if set(weights) != {"gate_up_proj", "down_proj"} or any(w.dim() != 3 for w in weights.values()):
        return False
    count, hidden, intermediate = weights["down_proj"].shape
    return weights["gate_up_proj"].shape == (count, 2 * intermediate, hidden)


def gates_plainly(experts: nn.Module) -> bool:
    """Whether experts in the form of ``is_experts`` give act(gate) * up, and clamp neither."""
    apply: Any = getattr(experts, "_apply_gate", None)
    activate: Any = getattr(experts, "act_fn", None)
    if apply is None or activate is None:
        return apply is None
    with torch.device("cpu"):
        gate, up = torch.linspace(-900, 1000, 80), torch.linspace(1000, -900, 80)
    return bool(torch.allclose(apply(torch.cat([gate, up])), activate(gate) * up, rtol=1e-4))


def clamped_gate(module: nn.Module) -> ClampedSwish | None:
    """The gated activation of experts in the form of gpt-oss, or None if they have another.

    Their weights are [E, H, 2 F], gate and up outputs in turn, and [E, F, H]; both have biases.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters(recurse=False)}
    slope, limit = (_number(getattr(module, name, None)) for name in ("alpha", "limit"))
    apply: Any = getattr(module, "_apply_gate", None)
    if len(shapes.get("down_proj", ())) != 3 or apply is None:
        return None
    count, inner, hidden = shapes["down_proj"]
    expected = {
        **{"gate_up_proj": (count, hidden, 2 * inner), "gate_up_proj_bias": (count, 2 * inner)},
        **{"down_proj": (count, inner, hidden), "down_proj_bias": (count, hidden)},
    }
    if shapes != expected or slope is None or limit is None:
        return None
    # Others may gate in another way, so the module is run to find out.
    with torch.device("cpu"):
        gate, up = torch.linspace(-2, 2, 40) * limit, torch.linspace(2, -3, 40) * limit
    low, within = gate.clamp(max=limit), up.clamp(-limit, limit)
    gated = (1 + within) * low * torch.sigmoid(slope * low)
    same = torch.allclose(apply(torch.stack([gate, up], dim=-1).flatten()), gated, atol=1e-5)
    return ClampedSwish(slope, limit) if same else None


def _number(value: object) -> float | None:
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def _children(module: nn.Module, bare: Bare = itself) -> dict[str, nn.Module]:
    children = module.named_children()
    return {name: bare(child) for name, child in children if not isinstance(child, _IDLE)}


def _pop_linears(
    owner: nn.Module, children: dict[str, nn.Module], *choices: tuple[str, ...]
) -> list[Linear]:
    """Removes and returns the linear layers of the first choice whose names all exist."""
    for names in choices:
        if all(is_linear(children.get(name)) for name in names):
            linears = [children.pop(name) for name in names]
            if children and not any(name in children for name in ("o_proj", "down_proj")):
                break
            return linears  # type: ignore[return-value]
    raise UnrecognizedModule(f"{type(owner).__name__} has {', '.join(_children(owner))}")


def norm_weight(norm: nn.Module | None) -> tuple[torch.Tensor, float] | None:
    """The factors [D] float32 of an RMS norm and its epsilon, or None if there is no norm.

    Some models multiply by 1 + weight (Gemma), so the module is run to find out.

    Raises:
        UnrecognizedModule: It is another kind of norm.
    """
    if norm is None:
        return None
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if not isinstance(eps, float) or weight is None or len(list(norm.parameters())) != 1:
        raise UnrecognizedModule(f"{type(norm).__name__} is not an RMS norm")
    x = torch.linspace(-1.0, 2.0, len(weight), dtype=weight.dtype, device=weight.device)
    scaled = x.float() / torch.sqrt(x.float().square().mean() + eps)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    for factor in (weight.detach().float(), 1.0 + weight.detach().float()):
        if torch.allclose(norm(x).float(), scaled * factor, rtol=tolerance, atol=tolerance):
            return factor.contiguous(), eps
    raise UnrecognizedModule(f"{type(norm).__name__} is not an RMS norm")
