"""Norms and gated MLPs of models that are not fused as a whole, on compiled kernels.

torch spends more time on starting their small operators than on a decode step's numbers.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.models.inspect_layers import norm_weight
from rayfin.actors.runner.models.narrow import packed
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Pack

MLP = ("gate_proj", "up_proj", "down_proj")
IDLE = {"act_fn", "activation_fn"}


class PackedNorm(nn.Module):
    """An RMS norm over the last dimension, in the dtype of x."""

    def __init__(self, kernels: CpuKernels, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._kernels, self.factor, self.eps = kernels, weight, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., D]."""
        y = self._kernels.rms_norm(rows_of(x), self.factor, self.eps)
        return y.view(x.shape).to(x.dtype)


class PackedGatedNorm(PackedNorm):
    """An RMS norm times SiLU of a gate."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[..., D], [..., D] -> [..., D]."""
        y = self._kernels.rms_norm(rows_of(x), self.factor, self.eps).view(x.shape)
        return y.mul_(nn.functional.silu(gate.float())).to(x.dtype)


class PackedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) in two products, in the dtype of x."""

    def __init__(self, kernels: CpuKernels, mlp: Any, activation: Activation, pack: Pack) -> None:
        super().__init__()
        self._kernels, self.activation = kernels, activation
        self.gate_up = packed(pack, [mlp.gate_proj.weight, mlp.up_proj.weight], paired=True)
        self.down = packed(pack, [mlp.down_proj.weight])
        first = [mlp.gate_proj.bias, mlp.up_proj.bias]
        self.first_bias = None if first[0] is None else torch.cat(first).detach().float()
        last = mlp.down_proj.bias
        self.last_bias = None if last is None else last.detach().float().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        run = self._kernels.matmul
        first, act = self.first_bias, self.activation
        inner = run(rows_of(x), self.gate_up, bias=first, activation=act)
        y = run(inner, self.down, bias=self.last_bias)
        return y.view(*x.shape[:-1], y.shape[-1]).to(x.dtype)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[..., D] -> [rows, D] float32, dense."""
    return x.reshape(-1, x.shape[-1]).float().contiguous()


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether its children are a gate, an up and a down projection, all plain."""
    children = dict(module.named_children())
    linears = [children.pop(name, None) for name in MLP]
    if set(children) - IDLE or any(type(linear) is not nn.Linear for linear in linears):
        return False
    gate, up = linears[:2]
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not own and (gate.bias is None) == (up.bias is None)  # type: ignore[union-attr]


def packed_norms(
    model: nn.Module, kernels: CpuKernels
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The norms of ``model`` that have a compiled form: owner, name and that form."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if (norm := packed_norm(child, kernels)) is not None:
                yield owner, name, norm


def packed_norm(module: nn.Module, kernels: CpuKernels) -> PackedNorm | None:
    """The compiled form of a norm, or None if it has none."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or list(module.children()):
        return None
    inputs = list(inspect.signature(module.forward).parameters)
    try:
        if len(inputs) == 1:
            own = norm_weight(module)
            return None if own is None else PackedNorm(kernels, *own)
        if len(inputs) == 2 and inputs[1] == "gate":
            return _packed_gated_norm(module, weight, kernels)
    except (UnrecognizedModule, RuntimeError, IndexError, TypeError):
        return None
    return None


def _packed_gated_norm(
    module: Any, weight: torch.Tensor, kernels: CpuKernels
) -> PackedGatedNorm | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float):
        return None
    x = torch.linspace(-1.0, 2.0, len(weight), dtype=weight.dtype).unsqueeze(0)
    made = PackedGatedNorm(kernels, weight.detach().float().contiguous(), eps)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    one, other = module(x, x.flip(1)).float(), made(x, x.flip(1)).float()
    return made if torch.allclose(one, other, rtol=tolerance, atol=tolerance) else None
