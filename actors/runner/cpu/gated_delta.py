"""Layers of the gated delta rule as two products and one call between them.

Families project queries, keys, values, gates and the rule's numbers by several matrices, and
compute on what these give with some twenty operators of torch, which a decode step spends more time
on than on their numbers. Here they are one matrix, whose outputs lie in the order in which the
compiled layer reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.cpu.packed_parts import PackedGatedNorm, packed_norm, rows_of
from rayfin.actors.runner.models.narrow import packed, stored
from rayfin.actors.runner.models.recurrent import Key, RecurrentLayers, RowByRow, StepPlan
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Pack
from rayfin.kernels.cpu.recurrent_rows import (
    MAX_TAPS,
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
SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
STATES: set[Key] = {("conv", 0), ("recurrent", 0)}
ACTIVATIONS = {"silu": Activation.SILU, "swish": Activation.SILU}


@dataclass(frozen=True, slots=True)
class DeltaParts:
    """What a layer is built of."""

    layer: RowByRow
    projections: Sequence[nn.Linear]
    order: torch.Tensor | None  # of the stacked projections' outputs, where it is not theirs
    out: nn.Linear
    between: GatedDelta


class PackedGatedDelta(nn.Module):
    """A layer of the gated delta rule for all rows of a step, in the dtype of its input."""

    def __init__(self, kernels: CpuKernels, parts: DeltaParts, pack: Pack) -> None:
        super().__init__()
        self._kernels, self._recurrent = kernels, RecurrentKernels(kernels)
        self._layer, self._between = parts.layer, parts.between
        weights = [linear.weight for linear in parts.projections]
        if parts.order is None:
            self._in = packed(pack, weights)
        else:
            self._in = pack([_picked(weights, parts.order)])
        self._out = packed(pack, [parts.out.weight])

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[1, T, H] -> [1, T, H], within a step."""
        step = self._layer.step()
        assert step is not None, "a forward outside of a step"
        return self.run(*step, args, kwargs)

    def run(
        self,
        plan: StepPlan,
        states: dict[Key, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor:
        """The same of a given step (a ``FusedForward``)."""
        if kwargs.get("attention_mask") is not None:
            raise UnrecognizedModule("a layer of the gated delta rule with a mask")
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        rows = RecurrentRows(plan.starts, plan.rows.read, plan.rows.write, plan.rows.before)
        x = self._kernels.matmul(rows_of(hidden), self._in)
        own = (states["conv", 0], states["recurrent", 0])
        y = self._kernels.matmul(
            self._recurrent.gated_delta(rows, x, self._between, *own), self._out
        )
        return y.view(*hidden.shape[:-1], y.shape[-1]).to(hidden.dtype)


def delta_parts(
    recurrent: RecurrentLayers | None, kernels: CpuKernels
) -> dict[nn.Module, DeltaParts]:
    """The layers that have this form, by their module; their states are compiled already."""
    found = {}
    for layer in recurrent.modules if recurrent is not None else ():
        if layer.fused is not None and set(layer.own.states) == STATES:
            parts = _parts(layer, kernels)
            if parts is not None:
                found[layer.own.module] = parts
    return found


def _parts(layer: RowByRow, kernels: CpuKernels) -> DeltaParts | None:
    module: Any = layer.own.module
    children = dict(module.named_children())
    names = next((own for own in PROJECTIONS if children.keys() >= set(own)), None)
    last = next((own for own in OUTPUTS if children.keys() >= set(own)), None)
    if names is None or last is None or children.keys() != {"conv1d", *names, *last}:
        return None
    linears = [children[name] for name in (*names, last[0])]
    if any(type(linear) is not nn.Linear or linear.bias is not None for linear in linears):
        return None
    sizes = [getattr(module, name, None) for name in SIZES]
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
    return DeltaParts(layer, linears[:-1], order, linears[-1], between)


def _by_kind(sizes: GatedDelta) -> torch.Tensor:
    """Outputs that lie by key heads, in the order of a layer's input [columns]."""
    heads, keys, repeat = sizes.key_heads, sizes.key_dim, sizes.value_heads // sizes.key_heads
    values = repeat * sizes.value_dim
    first = torch.arange(heads * (2 * keys + 2 * values)).view(heads, -1)
    last = torch.arange(first.numel(), sizes.columns).view(heads, -1)
    kinds = [*first.split([keys, keys, values, values], dim=1), *last.split(repeat, dim=1)]
    return torch.cat([kind.flatten() for kind in kinds])


def _picked(weights: Sequence[torch.Tensor], order: torch.Tensor) -> torch.Tensor:
    """The stacked weights [N, K] in another order, in the dtype that they are stored in."""
    return torch.cat([stored(weight) for weight in weights])[order]


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.detach().float().contiguous()
