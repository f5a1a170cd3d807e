"""Packed linear layers and experts, for models that are not fused as a whole (Mixtral, GPT-2).

Small products of few rows take most of a decode step, and torch on a CPU is slow at them.
"""

from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rayfin.actors.runner.cpu.build_decoder import Packing, packing, tolerance_of
from rayfin.actors.runner.cpu.gated_delta import (
    DeltaParts,
    PackedDeltaLayer,
    PackedGatedDelta,
    WholeParts,
    delta_parts,
    merge_layers,
)
from rayfin.actors.runner.cpu.packed_experts import has_packed_form, packed_experts
from rayfin.actors.runner.cpu.packed_parts import (
    PackedMLP,
    is_gated_mlp,
    packed_norms,
    packed_routers,
    rows_apart,
    rows_of,
)
from rayfin.actors.runner.models.indexer import inside_indexers
from rayfin.actors.runner.models.inspect_decoder import ACTIVATIONS
from rayfin.actors.runner.models.mapped_weights import packed
from rayfin.actors.runner.models.replace import Replaceable, verified_replacement
from rayfin.actors.runner.quantized.linear import inside_head
from rayfin.actors.settings.choices import Quantization
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Pack

Deltas = dict[nn.Module, DeltaParts | WholeParts]
"""Layers of the gated delta rule, or decoder layers around them, by the module they replace."""


class PackedLinear(nn.Module):
    """y = x W^T + b by the compiled kernels, in the dtype of x."""

    def __init__(
        self,
        kernels: CpuKernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pack: Pack,
    ) -> None:
        super().__init__()
        self._kernels = kernels
        self._weight = packed(pack, [weight])
        self._bias = None if bias is None else bias.detach().float().contiguous()
        # Some models ask for its type; a product with it fails.
        self.weight = torch.empty_like(weight, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        rows, outputs = rows_of(x), self._weight.columns
        out = rows_apart(len(rows), 1) if outputs == 1 else None  # a gate, which has a sigmoid
        y = self._kernels.matmul(rows, self._weight, bias=self._bias, out=out)
        return y.view(*x.shape[:-1], y.shape[-1]).to(x.dtype)


class PackedAtCall(nn.Module):
    """A packed module that is made for each call and then forgotten."""

    def __init__(self, module: nn.Module, pack: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._make = pack
        if isinstance(module, nn.Linear):
            self.weight = torch.empty_like(module.weight, device="meta")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the packed module gives."""
        return self._make()(*args, **kwargs)


@torch.inference_mode()
def pack_linears(
    paged: Replaceable,
    kernels: CpuKernels,
    quantization: Quantization | None = None,
    *,
    parts: bool = False,
) -> bool:
    """Replaces the linear layers, experts and routers of a model in place, and frees their weights.

    With ``parts`` also its norms, gated MLPs and layers of the gated delta rule, if the logits
    allow it. Returns False, with the original layers in place, if the model then gives other logits
    or reads a weight that is gone. The comparison uses exact weights; with ``quantization``
    those of one module at a time.
    """
    pack = partial(_pack, paged, kernels, quantization)
    merged = parts and bool(delta_parts(paged.recurrent, kernels))
    if merged and pack(parts=True, layers=True):
        return True
    return (parts and pack(parts=True)) or pack(parts=False)


def has_products(model: nn.Module) -> bool:
    """Whether large products are left to torch: linear layers, or experts of another form."""
    return any(
        type(module) is nn.Linear
        or any(
            weight.ndim == 3 and min(weight.shape) > 1
            for weight in module.parameters(recurse=False)
        )
        for module in model.modules()
    )


def _pack(
    paged: Replaceable,
    kernels: CpuKernels,
    quantization: Quantization | None,
    *,
    parts: bool,
    layers: bool = False,
) -> bool:
    config = paged.transformer.config.get_text_config(decoder=True)
    activation = ACTIVATIONS.get(getattr(config, "hidden_act", ""))
    exact = packing(kernels)
    deltas: Deltas = {}
    if parts:
        deltas.update(delta_parts(paged.recurrent, kernels))
    if layers:
        merge_layers(paged.transformer, deltas, kernels, activation)
    originals = list(_packable(paged.transformer, activation, deltas, mlps=parts))
    pack_one = partial(pack_module, kernels, activation, deltas)
    indexers = inside_indexers(paged.transformer)
    head = inside_head(paged.transformer) if quantization else ()

    def build() -> Iterator[Replaceable]:
        for owner, name, module in originals:
            pack = partial(pack_one, module, exact)
            setattr(owner, name, PackedAtCall(module, pack) if quantization else pack())
        for owner, name, norm in packed_norms(paged.transformer, kernels) if parts else ():
            setattr(owner, name, norm)
        for owner, name, router in packed_routers(paged.transformer, kernels):
            setattr(owner, name, router)
        yield paged

    if verified_replacement(paged, build, tolerance_of(paged)) is None:
        return False
    if quantization:
        rounded = packing(kernels, quantization)
        while originals:  # each is freed as soon as it is packed
            owner, name, module = originals.pop()
            # A rounded index would choose other keys.
            packs = exact if module in indexers else rounded.of(name)
            packed = pack_one(module, packs, is_head=module in head)
            setattr(owner, name, packed)
            deltas.pop(module, None)
            _take_over(packed)
    for owner, name, _ in originals:
        _take_over(getattr(owner, name))
    return True


def _take_over(module: nn.Module) -> None:
    if isinstance(module, PackedGatedDelta | PackedDeltaLayer):
        module.take_over()


def _packable(
    model: nn.Module,
    activation: Activation | None,
    deltas: Container[nn.Module],
    *,
    mlps: bool,
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    inside: set[nn.Module] = set()
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if owner in inside:
                continue
            whole = mlps and activation is not None and is_gated_mlp(child)
            whole = whole or child in deltas
            if whole:
                inside.update(child.modules())
            linear = type(child) is nn.Linear or type(child) is Conv1D
            if whole or linear or has_packed_form(child, activation):
                yield owner, name, child


def pack_module(
    kernels: CpuKernels,
    activation: Activation | None,
    deltas: Deltas,
    module: Any,
    packing: Packing,
    is_head: bool = False,
) -> nn.Module:
    """The packed form of a module that has one."""
    if module in deltas:
        return deltas[module].pack(kernels, packing.layers)
    if has_packed_form(module, activation):
        return packed_experts(kernels, module, activation, packing.layers)
    if is_gated_mlp(module):
        assert activation is not None
        return PackedMLP(kernels, module, activation, packing.layers, packing.down)
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
    pack = packing.head if is_head else packing.layers
    return PackedLinear(kernels, weight, module.bias, pack)
