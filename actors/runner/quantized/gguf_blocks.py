"""Blocks of GGUF files as llama.cpp has them (ggml-quants.h): some bytes for each block of inputs.

A layer is one tensor [outputs, bytes], named after the type of its blocks. Its rows are those of
the file. All products of a code and its scale are exact in float32.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rayfin.actors.runner.quantized.formats import Format, Part, Slot, Tensors, refuse
from rayfin.kernels.grouped import Grouped, SharedScales

LARGE = 256
"""Inputs of the K types' blocks."""

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers of 4-bit codes that are not linear."""


CHUNK = 1 << 18
"""Weights that are read at once: what is made of them on the way stays in a cache."""

Octets = npt.NDArray[np.uint8]
Halves = npt.NDArray[np.float16]


class Scales(NamedTuple):
    """Scales or least numbers of M blocks: a float each, and factors of its groups."""

    halves: Halves  # [M, 1]
    factors: npt.NDArray[np.int8] | None = None  # [M, groups]; None: of one group


class Numbers(NamedTuple):
    """What blocks [M, bytes] hold."""

    values: npt.NDArray[Any]  # [M, inputs] uint8 or int8
    scale: Scales
    least: Scales | None = None


class Block(NamedTuple):
    """A type of blocks."""

    inputs: int
    bytes: int
    bits: int  # of the codes in memory
    group: int  # inputs that share a scale
    read: Callable[[Octets], Numbers]
    zero: int | None = None
    table: tuple[int, ...] | None = None


def _half(octets: Octets) -> Halves:
    """[M, 2] -> [M, 1]."""
    return np.ascontiguousarray(octets).view(np.float16)


def _fields(octets: Octets, width: int, bits: int) -> Octets:
    """Fields of ``bits``: of each ``width`` bytes of [M, n] all lowest ones, then all next ones."""
    whole = octets.reshape(len(octets), -1, width)
    out = np.empty((len(octets), whole.shape[1], 8 // bits, width), np.uint8)
    for place in range(8 // bits):
        np.right_shift(whole, place * bits, out=out[:, :, place])
    out &= (1 << bits) - 1
    return out.reshape(len(octets), -1)


def _q4_0(octets: Octets) -> Numbers:
    return Numbers(_fields(octets[:, 2:], 16, 4), Scales(_half(octets[:, :2])))


def _q4_1(octets: Octets) -> Numbers:
    scale, least = Scales(_half(octets[:, :2])), Scales(_half(octets[:, 2:4]))
    return Numbers(_fields(octets[:, 4:], 16, 4), scale, least)


def _fifth(low: Octets, high: Octets) -> Octets:
    """Codes of 5 bits, the highest ones of which are the bits of four bytes: [M, 16], [M, 4]."""
    return _fields(low, 16, 4) | _fields(high, 1, 1) << np.uint8(4)


def _q5_0(octets: Octets) -> Numbers:
    codes = _fifth(octets[:, 6:], octets[:, 2:6])
    return Numbers(codes.view(np.int8) - 16, Scales(_half(octets[:, :2])))


def _q5_1(octets: Octets) -> Numbers:
    scale, least = Scales(_half(octets[:, :2])), Scales(_half(octets[:, 2:4]))
    return Numbers(_fifth(octets[:, 8:], octets[:, 4:8]), scale, least)


def _q8_0(octets: Octets) -> Numbers:
    return Numbers(octets[:, 2:].view(np.int8), Scales(_half(octets[:, :2])))


def _q2_k(octets: Octets) -> Numbers:
    both = octets[:, :16]
    scale = Scales(_half(octets[:, 80:82]), (both & 15).view(np.int8))
    least = Scales(-_half(octets[:, 82:]), (both >> 4).view(np.int8))
    return Numbers(_fields(octets[:, 16:80], 32, 2), scale, least)


def _q3_k(octets: Octets) -> Numbers:
    high, low, packed = octets[:, :32], octets[:, 32:96], octets[:, 96:108]
    factors = _fields(packed[:, :8], 8, 4) | _fields(packed[:, 8:], 4, 2) << 4
    scale = Scales(_half(octets[:, 108:]), factors.view(np.int8) - np.int8(32))
    # A bit that is not set takes 4 away. With 4 added the kernels need no zero points.
    return Numbers((_fields(low, 32, 2) | _fields(high, 32, 1) << 2) + 4, scale)


def _large_scales(octets: Octets) -> tuple[Scales, Scales]:
    """Scales and least numbers of 8 groups of two halves and twelve bytes: factors of 6 bits."""
    first, second, third = octets[:, 4:8], octets[:, 8:12], octets[:, 12:]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=1)
    leasts = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=1)
    return (
        Scales(_half(octets[:, :2]), scales.view(np.int8)),
        Scales(-_half(octets[:, 2:4]), leasts.view(np.int8)),
    )


def _q4_k(octets: Octets) -> Numbers:
    return Numbers(_fields(octets[:, 16:], 32, 4), *_large_scales(octets[:, :16]))


def _q5_k(octets: Octets) -> Numbers:
    codes = _fields(octets[:, 48:], 32, 4) | _fields(octets[:, 16:48], 32, 1) << 4
    return Numbers(codes, *_large_scales(octets[:, :16]))


def _q6_k(octets: Octets) -> Numbers:
    codes = _fields(octets[:, :128], 64, 4) | _fields(octets[:, 128:192], 32, 2) << 4
    scale = Scales(_half(octets[:, 208:]), octets[:, 192:208].view(np.int8))
    return Numbers(codes.view(np.int8) - 32, scale)


def _iq4_nl(octets: Octets) -> Numbers:
    return Numbers(_fields(octets[:, 2:], 16, 4), Scales(_half(octets[:, :2])))


def _iq4_xs(octets: Octets) -> Numbers:
    # Here the fields of a byte are those of groups beside each other.
    factors = _fields(octets[:, 4:8], 1, 4) | _fields(octets[:, 2:4], 1, 2) << 4
    scale = Scales(_half(octets[:, :2]), factors.view(np.int8) - np.int8(32))
    return Numbers(_fields(octets[:, 8:], 16, 4), scale)


BLOCKS = {
    "q4_0": Block(32, 18, 4, 32, _q4_0, zero=8),
    "q4_1": Block(32, 20, 4, 32, _q4_1),
    "q5_0": Block(32, 22, 8, 32, _q5_0),
    "q5_1": Block(32, 24, 8, 32, _q5_1),
    "q8_0": Block(32, 34, 8, 32, _q8_0),
    "q2_k": Block(LARGE, 84, 4, 16, _q2_k),
    "q3_k": Block(LARGE, 110, 4, 16, _q3_k, zero=8),
    "q4_k": Block(LARGE, 144, 4, 32, _q4_k),
    "q5_k": Block(LARGE, 176, 8, 32, _q5_k),
    "q6_k": Block(LARGE, 210, 8, 16, _q6_k),
    "iq4_nl": Block(32, 18, 4, 32, _iq4_nl, table=IQ4),
    "iq4_xs": Block(LARGE, 136, 4, 32, _iq4_xs, table=IQ4),
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
        if (blocks := part.each(block.inputs, inputs)) is None:
            return None
        return {self.kind: octets[:, blocks.start * block.bytes : blocks.stop * block.bytes]}

    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        block, stored = BLOCKS[self.kind], tensors[self.kind]
        device = stored.device
        octets = np.ascontiguousarray(stored.cpu().numpy()).reshape(-1, block.bytes)
        step = max(1, CHUNK // block.inputs)
        with np.errstate(invalid="ignore"):  # what is no number in the file is none here
            parts = [block.read(octets[at : at + step]) for at in range(0, len(octets), step)]

        def whole(arrays: Iterable[npt.NDArray[Any]]) -> torch.Tensor:
            rows = np.concatenate(list(arrays)).reshape(outputs, -1)
            return torch.from_numpy(rows).to(device)

        def scales(group_scales: list[Scales]) -> tuple[torch.Tensor, torch.Tensor | None]:
            halves = whole(scale.halves for scale in group_scales)
            if block.inputs == block.group:
                return halves, None
            return halves, whole(
                scale.factors for scale in group_scales if scale.factors is not None
            )

        shared = SharedScales(
            block.inputs // block.group,
            *scales([part.scale for part in parts]),
            *scales([part.least for part in parts if part.least is not None])
            if parts[0].least is not None
            else (),
        )
        scale, zero, table = shared.scales(), None, None
        if block.zero is not None:
            zero = torch.full(scale.shape, block.zero, dtype=torch.int32, device=device)
        if block.table is not None:
            table = torch.tensor(block.table, dtype=torch.float32, device=device)
        return Grouped(
            whole(part.values for part in parts),
            scale,
            *(block.group, block.bits, zero, table),
            least=shared.leasts(),
            shared=shared,
        )
