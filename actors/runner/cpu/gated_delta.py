"""Layers of the gated delta rule as two products and one call between them.

Families project queries, keys, values, gates and the rule's numbers by several matrices, and
compute on what these give with some twenty operators of torch, which a decode step spends more time
on than on their numbers. Here they are one matrix, whose outputs lie in the order in which the
compiled layer reads them. A decoder layer of such a layer and a gated MLP, with a norm before each,
is one call as a whole.
"""

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.cpu.packed_parts import (
    PackedGatedNorm,
    PackedMLP,
    PackedNorm,
    is_gated_mlp,
    packed_norm,
    rows_of,
)
from rayfin.actors.runner.models.mapped_weights import packed, stored
from rayfin.actors.runner.models.recurrent import Key, RecurrentLayers, RowByRow, StepPlan
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Pack
from rayfin.kernels.cpu.recurrent_rows import (
    MAX_TAPS,
    DeltaLayer,
    GatedDelta,
    RecurrentKernels,
    RecurrentRows,
)

PROJECTIONS = (
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),  # Qwen 3.5
    ("in_proj_qkvz", "in_proj_ba"),  # Qwen3-Next: by key heads
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),  # OLMo hybrid
)
OUTPUTS = (("out_proj", "norm"), ("o_proj", "o_norm"))
NORMS = ("input_layernorm", "post_attention_layernorm")
SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
STATES: set[Key] = {("conv", 0), ("recurrent", 0)}
ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU}


@dataclass(frozen=True, slots=True)
class DeltaParts:
    """What a layer is built of."""

    kernels: RecurrentKernels
    layer: RowByRow
    projections: Sequence[nn.Linear]
    order: torch.Tensor | None  # of the stacked projections' outputs, where it is not theirs
    out: nn.Linear
    between: GatedDelta

    def pack(self, kernels: CpuKernels, pack: Pack) -> "PackedGatedDelta":
        """The compiled form."""
        return PackedGatedDelta(kernels, self, pack)


@dataclass(frozen=True, slots=True)
class WholeParts:
    """A decoder layer around such a layer."""

    rule: DeltaParts
    norms: Sequence[PackedNorm]  # before the rule and before the MLP
    mlp: nn.Module
    activation: Activation

    def pack(self, kernels: CpuKernels, pack: Pack) -> "PackedDeltaLayer":
        """The compiled form."""
        mlp = PackedMLP(kernels, self.mlp, self.activation, pack)
        return PackedDeltaLayer(self.rule.pack(kernels, pack), self.norms, mlp)


class PackedGatedDelta(nn.Module):
    """A layer of the gated delta rule for all rows of a step, in the dtype of its input."""

    def __init__(self, kernels: CpuKernels, parts: DeltaParts, pack: Pack) -> None:
        super().__init__()
        self._kernels, self.recurrent = kernels, parts.kernels
        self._layer, self.between = parts.layer, parts.between
        weights = [linear.weight for linear in parts.projections]
        if parts.order is None:
            self.into = packed(pack, weights)
        else:
            self.into = pack([_picked(weights, parts.order)])
        self.out = packed(pack, [parts.out.weight])

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[1, T, H] -> [1, T, H], within a step."""
        return self.run(*self.step(), args, kwargs)

    def run(
        self,
        plan: StepPlan,
        states: dict[Key, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """The same of a given step (a ``FusedForward``)."""
        hidden = _input(args, kwargs)
        x = self._kernels.matmul(rows_of(hidden), self.into)
        y = self._kernels.matmul(
            self.recurrent.gated_delta(_rows(plan), x, self.between, *_states(states)), self.out
        )
        return y.view(*hidden.shape[:-1], y.shape[-1]).to(hidden.dtype)

    def step(self) -> tuple[StepPlan, dict[Key, torch.Tensor]]:
        """The step under way, and the states of all rows."""
        step = self._layer.step()
        assert step is not None, "a forward outside of a step"
        return step

    def take_over(self) -> None:
        """The module that this one was made of is not needed any more."""
        self._layer.give_way(self, self.run)


class PackedDeltaLayer(nn.Module):
    """A decoder layer of the gated delta rule in one call, in the dtype of its input."""

    def __init__(self, rule: PackedGatedDelta, norms: Sequence[PackedNorm], mlp: PackedMLP) -> None:
        super().__init__()
        self.rule = rule
        first, last = norms
        self._whole = DeltaLayer(
            rule=rule.between,
            rule_norm=first.factor,
            rule_eps=first.eps,
            into=rule.into,
            out=rule.out,
            mlp_norm=last.factor,
            mlp_eps=last.eps,
            gate_up=mlp.gate_up,
            down=mlp.down,
            gate_up_bias=mlp.first_bias,
            down_bias=mlp.last_bias,
            activation=mlp.activation,
        )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[1, T, H] -> [1, T, H], within a step."""
        plan, states = self.rule.step()
        hidden = _input(args, kwargs)
        x = rows_of(hidden).clone()
        self.rule.recurrent.delta_layer(_rows(plan), x, self._whole, *_states(states))
        return x.view(hidden.shape).to(hidden.dtype)

    def take_over(self) -> None:
        """The modules that this one was made of are not needed any more."""
        self.rule.take_over()


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    if kwargs.get("attention_mask") is not None:
        raise UnrecognizedModule("a layer of the gated delta rule with a mask")
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _rows(plan: StepPlan) -> RecurrentRows:
    rows = plan.rows
    return RecurrentRows(plan.starts, rows.read, rows.write, rows.before, rows.each)


def _states(states: dict[Key, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return states["conv", 0], states["recurrent", 0]


def merge_layers(
    model: nn.Module,
    by_module: MutableMapping[nn.Module, DeltaParts | WholeParts],
    kernels: CpuKernels,
    activation: Activation | None,
) -> None:
    """Puts decoder layers in the place of those of ``by_module`` that they are made of."""
    if activation is None:
        return
    for layer in model.modules():
        children = dict(layer.named_children())
        mixers = [child for child in children.values() if child in by_module]
        if len(children) != 4 or len(mixers) != 1 or not children.keys() >= {"mlp", *NORMS}:
            continue
        packed = [packed_norm(children[name], kernels) for name in NORMS]
        norms = [norm for norm in packed if norm is not None and type(norm) is PackedNorm]
        tensors = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        rule, mlp = by_module[mixers[0]], children["mlp"]
        if tensors or len(norms) != 2 or not isinstance(rule, DeltaParts) or not is_gated_mlp(mlp):
            continue
        del by_module[mixers[0]]
        by_module[layer] = WholeParts(rule, norms, mlp, activation)


def delta_parts(
    recurrent: RecurrentLayers | None, kernels: CpuKernels
) -> dict[nn.Module, DeltaParts]:
    """The layers that have this form, by their module; their states are compiled already."""
    by_module, row_kernels = {}, RecurrentKernels(kernels)
    for layer in recurrent.modules if recurrent is not None else ():
        if layer.fused is not None and set(layer.own.states) == STATES:
            parts = _parts(layer, kernels, row_kernels)
            if parts is not None:
                by_module[layer.own.module] = parts
    return by_module


def _parts(
    layer: RowByRow, kernels: CpuKernels, row_kernels: RecurrentKernels
) -> DeltaParts | None:
    module: Any = layer.own.module
    children = dict(module.named_children())
    names = next((some for some in PROJECTIONS if children.keys() >= set(some)), None)
    last = next((some for some in OUTPUTS if children.keys() >= set(some)), None)
    if names is None or last is None or children.keys() != {"conv1d", *names, *last}:
        return None
    linears = [children[name] for name in (*names, last[0])]
    if any(type(linear) is not nn.Linear or linear.bias is not None for linear in linears):
        return None
    sizes: list[Any] = [getattr(module, name, None) for name in SIZES]
    activation = ACTIVATIONS.get(getattr(module, "activation", ""))
    norm = packed_norm(children[last[1]], kernels)
    plain = set(dict(module.named_parameters(recurse=False))) == {"A_log", "dt_bias"}
    if not isinstance(norm, PackedGatedNorm) or activation is None or not plain:
        return None
    if not all(map(_is_size, sizes)):
        return None
    key_heads, value_heads, key_dim, value_dim = sizes
    conv, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    columns = channels + value_heads * (value_dim + 2)
    given = sum(linear.out_features for linear in linears[:-1])
    shapes = (tuple(conv.shape[:1]), tuple(module.A_log.shape), tuple(norm.factor.shape))
    expected = ((channels,), (value_heads,), (value_dim,))
    if given != columns or shapes != expected or not 0 < conv.shape[1] <= MAX_TAPS:
        return None
    between = GatedDelta(
        conv=_dense(conv.T),
        conv_bias=None if bias is None else _dense(bias),
        activation=activation,
        rate=_dense(-module.A_log.detach().float().exp()),
        shift=_dense(module.dt_bias),
        norm=norm.factor,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        eps=norm.eps,
        beta_scale=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
    )
    order = _by_kind(between) if "in_proj_qkvz" in names else None
    return DeltaParts(row_kernels, layer, linears[:-1], order, linears[-1], between)


def _by_kind(sizes: GatedDelta) -> torch.Tensor:
    """Outputs that lie by key heads, in the order of a layer's input [columns]."""
    heads, keys, repeat = sizes.key_heads, sizes.key_dim, sizes.value_heads // sizes.key_heads
    values = repeat * sizes.value_dim
    first = torch.arange(heads * (2 * keys + 2 * values)).view(heads, -1)
    last = torch.arange(first.numel(), sizes.columns).view(heads, -1)
    kinds = [
        *torch.split(first, [keys, keys, values, values], dim=1),
        *torch.split(last, repeat, dim=1),
    ]
    return torch.cat([kind.flatten() for kind in kinds])


def _picked(weights: Sequence[torch.Tensor], order: torch.Tensor) -> torch.Tensor:
    """The stacked weights [N, K] in another order, in the dtype that they are stored in."""
    return torch.cat([stored(weight) for weight in weights])[order]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.detach().float().contiguous()
