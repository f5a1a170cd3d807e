"""Quantised layers on the Triton kernels, their weights as small as in the checkpoint.

Plain layers can be rounded to as few bits when they are loaded.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from rayfin.actors.runner.models.indexer import inside_indexers
from rayfin.actors.runner.quantized.linear import SmallLinear, inside_head
from rayfin.actors.runner.quantized.loader import quant_linears
from rayfin.kernels.grouped import Grouped, round_weight
from rayfin.kernels.triton.quantized import (
    SCALED_ROWS,
    CodedWeight,
    pack_weight,
    product,
    scaled_for,
    stack_weights,
    widened,
    with_rounded_rows,
)
from rayfin.kernels.triton.scaled import rounded_rows

logger = logging.getLogger(__name__)

GATES = ("gate", "router")
"""How names of layers end that choose experts or weigh them, which are small and matter."""

READ = ("dt_proj",)
"""How names of layers end whose weight the model multiplies by itself (Mamba): these are plain."""

UNLIKE = "other codes, or scales of other blocks"
"""Why rows of a layer stay exact that were to be rounded."""

CHECKED_ROWS = (1, 17, 33, 65, 129)
"""Rows of a step of each tile, and of one that makes the weight whole."""

CHECKED_OUTPUTS = 4096
"""The last ones of a layer, whose plain weight is for the comparison only."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""The largest difference from the plain product, as a share of its largest number."""


class TritonLinear(SmallLinear):
    """y = x W^T + b of a weight of codes, each rounded at most once to the dtype of x.

    Nothing waits for the device, so that CUDA graphs record it.
    """

    def __init__(self, codes: CodedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes = codes
        self.out_features, self.in_features = codes.outputs, codes.inputs
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.weight = torch.empty(codes.outputs, codes.inputs, dtype=dtype, device="meta")

    @property
    def rounds_rows(self) -> bool:
        return self.codes.scaled is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        y = product(x.reshape(-1, x.shape[-1]), self.codes, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])

    def dequantized(self) -> nn.Linear:
        """A plain layer of the same numbers, each rounded once."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        weight, order = widened(self.codes, self.weight.dtype), self.codes.order
        if order is not None:
            weight = torch.empty_like(weight).index_copy_(1, order, weight)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        linear.bias = self.bias  # type: ignore[assignment]
        return linear


class CheckedKernel:
    """Packs weights for the kernel, which it compares with the plain product.

    The first weight of each kind is compared: of a size, a type of codes and scales. So a device
    that has no room for the kernel, or computes something else, serves plain weights. Products of
    rows that are rounded are compared with those of rounded rows, and else rows stay exact.
    """

    def __init__(self, round_rows: bool = False) -> None:
        self._round_rows = round_rows
        self._why: dict[tuple[object, ...], str] = {}  # by kinds; "": they agree
        self.refused = 0  # weights that pack_weight read
        self.rounded = 0  # those that round their rows
        self.exact = 0  # and those that were to, and do not
        self._why_exact = self._why_plain = ""

    def pack(self, weight: Grouped, dtype: torch.dtype) -> CodedWeight | None:
        """The weight for rows of ``dtype``, or None if the kernel has to leave it."""
        codes = pack_weight(weight, dtype)
        if codes is None:
            return None
        if self._round_rows:
            rounded, why = with_rounded_rows(codes), UNLIKE
            if rounded.scaled is not None and not (why := self._fault(rounded, weight, dtype)):
                self.rounded += 1
                return rounded
            self.exact, self._why_exact = self.exact + 1, why
        fault = self._fault(codes, weight, dtype)
        if not fault:
            return codes
        self.refused, self._why_plain = self.refused + 1, self._why_plain or fault
        return None

    def _fault(self, codes: CodedWeight, weight: Grouped, dtype: torch.dtype) -> str:
        parts = (codes.zeros, codes.table, codes.order, codes.scaled)
        absent = [part is None for part in parts]
        kind = (*weight.shape, codes.kind, codes.bits, codes.form, codes.group, *absent, dtype)
        if kind not in self._why:
            self._why[kind] = fault_of(codes, last_outputs(weight, CHECKED_OUTPUTS).to(dtype))
        return self._why[kind]

    def warn(self) -> None:
        """Says what stays plain, if anything does."""
        if self.refused:
            logger.warning(
                "%d layers of few bits are plain, as with --quantization dequantize: their kernel "
                "does not work on this device (%s)",
                self.refused,
                self._why_plain,
            )
        if self._round_rows:
            kept = f"; those of {self.exact} are exact ({self._why_exact})" if self.exact else ""
            logger.log(
                logging.WARNING if kept else logging.INFO,
                "rows of %d layers are rounded to fp8 in steps of at least %d of them%s",
                *(self.rounded, SCALED_ROWS, kept),
            )


def last_outputs(weight: Grouped, count: int) -> torch.Tensor:
    """The plain weight [count or less, K] fp32 of the last outputs."""
    zero = None if weight.zero is None else weight.zero[-count:]
    values, scale = weight.values[-count:], weight.scale[-count:]
    return replace(weight, values=values, scale=scale, zero=zero).dense()


def fault_of(codes: CodedWeight, weight: torch.Tensor) -> str:
    """Why the kernel cannot multiply by codes, of whose last outputs ``weight`` is the plain one.

    "" if it can.
    """
    random = torch.Generator().manual_seed(0)
    for rows in CHECKED_ROWS:
        # Outputs are about as large as weights, which float16 holds.
        x = torch.randn(rows, codes.inputs, generator=random) / codes.inputs**0.5
        x = x.to(device=weight.device, dtype=weight.dtype)
        scaled = scaled_for(codes, rows)
        shown = x if scaled is None else rounded_rows(x, scaled.by_block).to(x.dtype)
        wanted = nn.functional.linear(shown, weight).float()
        try:
            given = product(x, codes, None)[:, -len(weight) :].float()
            difference = (given - wanted).abs().max()
            share = float(difference / wanted.abs().max().clamp(min=1e-30))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's, the launcher's or the device's
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0]}"
        if not share <= TOLERANCE.get(weight.dtype, TOLERANCE[torch.float32]):
            return f"products of {rows} rows differ by {share:.1e}"
    return ""


@torch.no_grad()
def pack_quantized(model: nn.Module, *, round_rows: bool = False) -> int:
    """Replaces the quantised layers, one after the other, and returns the bytes of their weights.

    With ``round_rows`` those of fp8 round their rows to fp8 where there are many. The device holds
    one layer's numbers at most beside the codes. Layers of codes that the kernels do not read
    become plain, and so do those whose products would differ.
    """
    layers, plain, size, kernel = quant_linears(model), 0, 0, CheckedKernel(round_rows)
    while layers:
        owner, name, layer = layers.pop()
        if name.endswith(READ):
            setattr(owner, name, layer.dequantized())
            continue
        codes = kernel.pack(layer.grouped(), layer.dtype)
        if codes is None:
            plain += 1
            setattr(owner, name, layer.dequantized())
            continue
        size += codes.bytes
        setattr(owner, name, TritonLinear(codes, layer.bias, layer.dtype))
    if size:
        logger.info("quantized weights stay in %d MiB of the GPU", size >> 20)
    kernel.warn()
    if plain > kernel.refused:
        unread = plain - kernel.refused
        logger.warning("%d layers of codes that no kernel reads are plain", unread)
    return size


@torch.no_grad()
def round_linears(model: PreTrainedModel, bits: int) -> int:
    """Rounds the plain linear layers in place, one after the other, and returns how many it met.

    The head stays, and with it the embedding, and so do experts, gates and indexers. Rows are not
    rounded. Layers whose products would differ stay plain.
    """
    head, kernel = inside_head(model), CheckedKernel()
    indexers = {id(part) for part in inside_indexers(model)}  # a rounded one chooses other keys
    # Names, not layers: a plain weight is gone before the next one is rounded.
    places = [
        (owner, name)
        for owner in model.modules()
        if id(owner) not in indexers
        for name, layer in owner.named_children()
        if type(layer) is nn.Linear and layer not in head and not name.endswith(GATES + READ)
    ]
    for owner, name in places:
        _round(owner, name, bits, kernel)
    kernel.warn()
    return len(places)


def _round(owner: nn.Module, name: str, bits: int, kernel: CheckedKernel) -> None:
    layer: nn.Linear = getattr(owner, name)
    codes = kernel.pack(round_weight(layer.weight, bits), layer.weight.dtype)
    if codes is not None:
        setattr(owner, name, TritonLinear(codes, layer.bias, layer.weight.dtype))


def merged(layers: Sequence[TritonLinear]) -> CodedWeight | None:
    """One weight of the layers, which keep a part of it each; None if they are not alike."""
    if len(layers) == 1:
        return layers[0].codes
    whole, start = stack_weights([layer.codes for layer in layers]), 0
    if whole is None:
        return None
    for layer in layers:
        layer.codes = whole.part(start, layer.out_features)
        start += layer.out_features
    return whole
