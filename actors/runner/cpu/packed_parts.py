"""Norms, gated MLPs and routers of models that are not fused as a whole, on compiled kernels.

torch spends more time on starting their small operators than on a decode step's numbers. And its
results of a row depend in their last bits on the rows beside it; those of the compiled kernels do
not.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.models.inspect_layers import norm_weight
from rayfin.actors.runner.models.mapped_weights import packed
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Matrix, Pack

MLP = ("gate_proj", "up_proj", "down_proj")
IDLE = {"act_fn", "activation_fn"}

VECTOR = 32
"""Numbers that torch computes at once at most: two vectors of 512 bits."""


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

    def __init__(
        self,
        kernels: CpuKernels,
        mlp: Any,
        activation: Activation,
        pack: Pack,
        down: Pack | None = None,
    ) -> None:
        super().__init__()
        self._kernels, self.activation = kernels, activation
        self.gate_up = packed(pack, [mlp.gate_proj.weight, mlp.up_proj.weight], paired=True)
        self.down = packed(down or pack, [mlp.down_proj.weight])
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


class PackedWeight(torch.Tensor):
    """A weight [N, K] whose products, by ``functional.linear``, run on the compiled kernels.

    For modules that call this function themselves, as routers of experts do. Any other function
    reads the weight as it is.
    """

    _is_param = True  # what torch.nn tells a parameter by

    @staticmethod
    def __new__(cls, weight: torch.Tensor, kernels: CpuKernels, matrix: Matrix) -> "PackedWeight":
        packed: PackedWeight = torch.Tensor._make_subclass(cls, weight.detach(), False)
        return packed

    def __init__(self, weight: torch.Tensor, kernels: CpuKernels, matrix: Matrix) -> None:
        self._kernels, self.matrix = kernels, matrix

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """``func``; a copy of the weight in another dtype has the same products."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is functional.linear and len(args) > 1 and isinstance(args[1], PackedWeight):
                return args[1]._linear(args[0], *args[2:], **(kwargs or {}))
            out = func(*args, **(kwargs or {}))
        if func in _CASTS and type(out) is torch.Tensor and isinstance(args[0], PackedWeight):
            return PackedWeight(out, args[0]._kernels, args[0].matrix)
        return out

    def _linear(self, input: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        x = rows_of(input)
        wide_bias = None if bias is None else bias.float()
        out = rows_apart(len(x), len(self))
        y = self._kernels.matmul(x, self.matrix, bias=wide_bias, out=out)
        return y.view(*input.shape[:-1], y.shape[-1]).to(input.dtype)


_CASTS = {torch.Tensor.float, torch.Tensor.to, torch.Tensor.type}


def rows_apart(rows: int, columns: int) -> torch.Tensor:
    """Memory for [rows, columns] float32 of which torch computes each row in the same way.

    It computes vectors of numbers that lie side by side, and those behind the last full vector one
    by one, which gives other last bits. So rows that are no full vectors do not touch.
    """
    touching = columns % VECTOR == 0
    return torch.empty(rows, columns if touching else columns + 1)[:, :columns]


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
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not tensors and (gate.bias is None) == (up.bias is None)  # type: ignore[union-attr]


def packed_norms(
    model: nn.Module, kernels: CpuKernels
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The norms of ``model`` that have a compiled form: owner, name and that form."""
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if (norm := packed_norm(child, kernels)) is not None:
                yield owner, name, norm


def packed_routers(
    model: nn.Module, kernels: CpuKernels
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The modules of ``model`` that multiply by a weight of their own: owner, name and a twin.

    The twin is such a module with that weight packed; all else they share.
    """
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if _multiplies(child):
                weight, twin = child._parameters["weight"], copy.copy(child)
                assert weight is not None
                packed_weight = PackedWeight(weight, kernels, kernels.pack([weight]))
                twin.__dict__["_parameters"] = {**child._parameters, "weight": packed_weight}
                yield owner, name, twin


def _multiplies(module: nn.Module) -> bool:
    """Whether it calls ``linear`` with its own weight, and is no layer that is packed as such."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or isinstance(module, nn.Linear | Conv1D):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and {"linear", "weight"} <= set(code.co_names)


def packed_norm(module: nn.Module, kernels: CpuKernels) -> PackedNorm | None:
    """The compiled form of a norm, or None if it has none."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or list(module.children()):
        return None
    inputs = list(inspect.signature(module.forward).parameters)
    try:
        if len(inputs) == 1:
            parameters = norm_weight(module)
            return None if parameters is None else PackedNorm(kernels, *parameters)
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
    packed = PackedGatedNorm(kernels, weight.detach().float().contiguous(), eps)
    tolerance = 1e-4 if weight.dtype == torch.float32 else 2e-2
    one, other = module(x, x.flip(1)).float(), packed(x, x.flip(1)).float()
    return packed if torch.allclose(one, other, rtol=tolerance, atol=tolerance) else None
