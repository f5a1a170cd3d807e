"""Blocks of GGUF files as llama.cpp has them (ggml-quants.h): some bytes for each block of inputs.

A layer is one tensor [outputs, bytes], named after the type of its blocks. Its rows are those of
the file. All products of a code and its scale are exact in float32.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rayfin.actors.runner.quantized.formats import Format, Part, Slot, Tensors, refuse
from rayfin.kernels.grouped import Grouped

LARGE = 256
"""Inputs of the K types' blocks."""

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of 4-bit codes that are not linear."""


class Numbers(NamedTuple):
    """What blocks [M, bytes] hold."""

    values: torch.Tensor  # [M, inputs] uint8 or int8
    scale: torch.Tensor  # [M, groups] float32
    zero: int | None = None
    least: torch.Tensor | None = None  # [M, groups] float32
    table: tuple[int, ...] | None = None


class Block(NamedTuple):
    """A type of blocks."""

    inputs: int
    bytes: int
    bits: int  # of the codes in memory
    group: int  # inputs that share a scale
    read: Callable[[torch.Tensor], Numbers]


def _half(octets: torch.Tensor) -> torch.Tensor:
    """[M, 2 n] uint8 -> [M, n] float32."""
    return octets.contiguous().view(torch.float16).float()


def _fields(octets: torch.Tensor, width: int, bits: int) -> torch.Tensor:
    """Fields of ``bits``: of each ``width`` bytes of [M, n] all lowest ones, then all next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=octets.device).unsqueeze(1)
    whole = octets.reshape(len(octets), -1, 1, width)
    return (whole >> shifts & (1 << bits) - 1).flatten(1)


def _q4_0(octets: torch.Tensor) -> Numbers:
    return Numbers(_fields(octets[:, 2:], 16, 4), _half(octets[:, :2]), zero=8)


def _q4_1(octets: torch.Tensor) -> Numbers:
    scale, least = _half(octets[:, :2]), _half(octets[:, 2:4])
    return Numbers(_fields(octets[:, 4:], 16, 4), scale, least=least)


def _fifth(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Codes of 5 bits, the highest ones of which are the bits of four bytes: [M, 16], [M, 4]."""
    return _fields(low, 16, 4) | _fields(high, 1, 1) << 4


def _q5_0(octets: torch.Tensor) -> Numbers:
    codes = _fifth(octets[:, 6:], octets[:, 2:6])
    return Numbers(codes.view(torch.int8) - 16, _half(octets[:, :2]))


def _q5_1(octets: torch.Tensor) -> Numbers:
    scale, least = _half(octets[:, :2]), _half(octets[:, 2:4])
    return Numbers(_fifth(octets[:, 8:], octets[:, 4:8]), scale, least=least)


def _q8_0(octets: torch.Tensor) -> Numbers:
    return Numbers(octets[:, 2:].contiguous().view(torch.int8), _half(octets[:, :2]))


def _q2_k(octets: torch.Tensor) -> Numbers:
    both, large = octets[:, :16], _half(octets[:, 80:])
    scale, least = large[:, :1] * (both & 15), -(large[:, 1:] * (both >> 4))
    return Numbers(_fields(octets[:, 16:80], 32, 2), scale, least=least)


def _q3_k(octets: torch.Tensor) -> Numbers:
    high, low, packed = octets[:, :32], octets[:, 32:96], octets[:, 96:108]
    factors = _fields(packed[:, :8], 8, 4) | _fields(packed[:, 8:], 4, 2) << 4
    scale = _half(octets[:, 108:]) * (factors.view(torch.int8) - 32)
    # A bit that is not set takes 4 away. With 4 added the kernels need no zero points.
    return Numbers((_fields(low, 32, 2) | _fields(high, 32, 1) << 2) + 4, scale, zero=8)


def _large_scales(octets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and least numbers [M, 8] of two halves and twelve bytes: factors of 6 bits."""
    first, second, third = octets[:, 4:8], octets[:, 8:12], octets[:, 12:]
    scales = torch.cat([first & 63, third & 15 | first >> 2 & 48], dim=1)
    leasts = torch.cat([second & 63, third >> 4 | second >> 2 & 48], dim=1)
    return _half(octets[:, :2]) * scales, -(_half(octets[:, 2:4]) * leasts)


def _q4_k(octets: torch.Tensor) -> Numbers:
    scale, least = _large_scales(octets[:, :16])
    return Numbers(_fields(octets[:, 16:], 32, 4), scale, least=least)


def _q5_k(octets: torch.Tensor) -> Numbers:
    scale, least = _large_scales(octets[:, :16])
    codes = _fields(octets[:, 48:], 32, 4) | _fields(octets[:, 16:48], 32, 1) << 4
    return Numbers(codes, scale, least=least)


def _q6_k(octets: torch.Tensor) -> Numbers:
    low, high = octets[:, :128], octets[:, 128:192]
    codes = _fields(low, 64, 4) | _fields(high, 32, 2) << 4
    scale = _half(octets[:, 208:]) * octets[:, 192:208].contiguous().view(torch.int8)
    return Numbers(codes.view(torch.int8) - 32, scale)


def _iq4_nl(octets: torch.Tensor) -> Numbers:
    return Numbers(_fields(octets[:, 2:], 16, 4), _half(octets[:, :2]), table=IQ4)


def _iq4_xs(octets: torch.Tensor) -> Numbers:
    high, low = octets[:, 2:4], octets[:, 4:8]
    factors = _each(low, 4) | _each(high, 2) << 4
    scale = _half(octets[:, :2]) * (factors.view(torch.int8) - 32)
    return Numbers(_fields(octets[:, 8:], 16, 4), scale, table=IQ4)


def _each(octets: torch.Tensor, bits: int) -> torch.Tensor:
    """The fields of ``bits`` in each byte [M, n] one after the other, the lowest first."""
    return _fields(octets, 1, bits)


BLOCKS = {
    "q4_0": Block(32, 18, 4, 32, _q4_0),
    "q4_1": Block(32, 20, 4, 32, _q4_1),
    "q5_0": Block(32, 22, 8, 32, _q5_0),
    "q5_1": Block(32, 24, 8, 32, _q5_1),
    "q8_0": Block(32, 34, 8, 32, _q8_0),
    "q2_k": Block(LARGE, 84, 4, 16, _q2_k),
    "q3_k": Block(LARGE, 110, 4, 16, _q3_k),
    "q4_k": Block(LARGE, 144, 4, 32, _q4_k),
    "q5_k": Block(LARGE, 176, 8, 32, _q5_k),
    "q6_k": Block(LARGE, 210, 8, 16, _q6_k),
    "iq4_nl": Block(32, 18, 4, 32, _iq4_nl),
    "iq4_xs": Block(LARGE, 136, 4, 32, _iq4_xs),
}
"""The types that are read; a layer's tensor has such a name."""


@dataclass(frozen=True)
class Gguf(Format):
    """Blocks of a type, or of any type where a layer is not named yet."""

    kind: str = ""

    @property
    def key(self) -> str:
        return self.kind

    @property
    def label(self) -> str:
        """The format in words, for the log."""
        return f"GGUF {self.kind.upper() or 'blocks'}"

    def as_stored(self, names: Iterable[str]) -> "Gguf":
        kind = next((name for name in names if name in BLOCKS), "")
        if not kind:
            return self
        return replace(self, kind=kind, bits=BLOCKS[kind].bits, group=BLOCKS[kind].group)

    def slots(
        self, outputs: int, inputs: int, stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Slot]:
        if not self.kind:
            return {kind: Slot((None, None), torch.uint8) for kind in BLOCKS}
        block = BLOCKS[self.kind]
        if inputs % block.inputs:
            raise refuse(f"{inputs} inputs are not whole blocks of {block.inputs}")
        return {self.kind: Slot((outputs, inputs // block.inputs * block.bytes), torch.uint8)}

    def part(
        self, outputs: int, inputs: int, tensors: Tensors, part: Part
    ) -> dict[str, torch.Tensor] | None:
        block, octets = BLOCKS[self.kind], tensors[self.kind]
        if part.dim == 0:
            return {self.kind: octets[part.run.start : part.run.stop]}
        if (own := part.each(block.inputs, inputs)) is None:
            return None
        return {self.kind: octets[:, own.start * block.bytes : own.stop * block.bytes]}

    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        block = BLOCKS[self.kind]
        found = block.read(tensors[self.kind].reshape(-1, block.bytes))
        scale = found.scale.view(outputs, -1)
        zero = table = None
        if found.zero is not None:
            zero = torch.full(scale.shape, found.zero, dtype=torch.int32, device=scale.device)
        if found.table is not None:
            table = torch.tensor(found.table, dtype=torch.float32, device=scale.device)
        return Grouped(
            found.values.view(outputs, inputs),
            scale.contiguous(),
            block.group,
            block.bits,
            zero,
            table,
            least=None if found.least is None else found.least.reshape(outputs, -1),
        )
