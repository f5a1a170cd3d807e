"""Products with weights of 4 and 8 bits that stay so in memory.

A weight is (number - zero) * scale or table[code] * scale, rounded once to the dtype of the rows
that it multiplies (as `Grouped.dense`, rounded). Rows are not rounded, and sums are in fp32.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton

from rayfin.kernels.grouped import Grouped
from rayfin.kernels.triton.device import quant_kernels as kernels

INTEGER, E4M3, TABLE = (kind.value for kind in (kernels.INTEGER, kernels.E4M3, kernels.TABLE))
WIDE, HALF, BRAIN = (form.value for form in (kernels.WIDE, kernels.HALF, kernels.BRAIN))
FORMS = {WIDE: torch.float32, HALF: torch.float16, BRAIN: torch.bfloat16}
DEPTH = 128
"""Inputs of a block: a program multiplies so many at once."""

MIDDLES = {4: 8, 8: 128}
"""Zero points of codes that need none of their own, by bits."""

E4M3_FACTOR = 2.0**120
"""On scales of e4m3, whose bits the kernel reads as those of fp32 (`numbers_of`)."""

LARGEST_E4M3_SCALE = 128.0

PROGRAMS_PER_CORE = 3
"""Programs that a multiprocessor has room for, and needs to keep memory busy."""

MOST_PARTS = 16

LEAST_BLOCKS = 4
"""Blocks of inputs at least that a program sums: fewer cost more to add up than they gain."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The sizes of a program's tile."""

    rows: int
    columns: int
    warps: int
    stages: int
    splits: bool = True  # whether programs may share the inputs of an output


FEW = ProductShape(rows=16, columns=64, warps=4, stages=5)
"""For rows of a decode step: the smallest tile that a tensor core multiplies."""

SOME = ProductShape(rows=64, columns=64, warps=4, stages=4)

MANY = ProductShape(rows=128, columns=128, warps=8, stages=3, splits=False)

TIGHT = ProductShape(rows=64, columns=64, warps=4, stages=3)
"""For any rows above `FEW`, where a program has less shared memory than ``WIDE_BYTES``."""

WIDE_BYTES = 160 << 10
"""Shared memory of devices on which `SOME` and `MANY` fit: sm_80, and sm_90 and its successors.

Others, such as sm_86, sm_89 and sm_120, have 99 KiB.
"""

PRECISE = ProductShape(rows=16, columns=16, warps=8, stages=2)
"""For float32, which tensor cores do not multiply."""


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight [N, K] of codes on a device, in the order of the kernel."""

    words: torch.Tensor  # [N, W] int32: codes of successive inputs, padded to blocks of DEPTH
    groups: torch.Tensor  # [G, N] int32: a scale in 16 bits, a zero point above; fp32: scales
    arrived: torch.Tensor  # [N] int32 zeros, counters of programs
    inputs: int  # K
    group: int  # inputs that share a scale
    bits: int  # of a code: 4 or 8
    kind: int
    form: int  # of scales
    zeros: torch.Tensor | None = None  # [G, N] fp32 beside scales in fp32; None: the usual one
    table: torch.Tensor | None = None  # [16] fp32
    order: torch.Tensor | None = None  # [K] int64: input i of the kernel is x[:, order[i]]

    @property
    def outputs(self) -> int:
        """The number of outputs (N)."""
        return self.words.shape[0]

    @property
    def bytes(self) -> int:
        """Of all its tensors."""
        parts = (self.words, self.groups, self.zeros, self.table, self.order, self.arrived)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def like(self, other: "CodedWeight") -> bool:
        """Whether both can lie in one weight."""

        def equal(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
            return one is two or (one is not None and two is not None and torch.equal(one, two))

        mine, theirs = ((w.kind, w.bits, w.group, w.inputs) for w in (self, other))
        return mine == theirs and equal(self.order, other.order) and equal(self.table, other.table)

    def part(self, start: int, count: int) -> "CodedWeight":
        """Some of the outputs, without a copy."""
        end = start + count
        zeros = None if self.zeros is None else self.zeros[:, start:end]
        return replace(
            self,
            words=self.words[start:end],
            groups=self.groups[:, start:end],
            arrived=self.arrived[start:end],
            zeros=zeros,
        )


def pack_weight(weight: Grouped) -> CodedWeight | None:
    """The weight on its device, or None if the kernel does not read such codes."""
    coded = _codes_of(weight)
    if coded is None:
        return None
    kind, codes, zero = coded
    outputs, inputs = weight.shape
    bits = 4 if kind == TABLE or weight.bits <= 4 else 8
    each, padded = 32 // bits, -(-inputs // DEPTH) * DEPTH
    group = weight.group if weight.group < inputs else padded
    if math.gcd(group, DEPTH) % each:
        return None
    codes = torch.nn.functional.pad(codes, (0, padded - inputs)).view(outputs, -1, each)
    words = codes[:, :, 0].int()
    for i in range(1, each):
        words |= codes[:, :, i].int() << (bits * i)
    scales = weight.scale.float()
    if kind == E4M3:
        scales = scales * E4M3_FACTOR
    form, groups, zeros = _groups_of(_turned(scales), _turned(zero), bits, kind)
    return CodedWeight(
        words,
        groups,
        torch.zeros(outputs, dtype=torch.int32, device=words.device),
        inputs,
        group,
        bits,
        kind,
        form,
        zeros=zeros,
        table=None if weight.table is None else weight.table.float().contiguous(),
        order=weight.order,
    )


def stack_weights(weights: list[CodedWeight]) -> CodedWeight | None:
    """One weight of the outputs of several, or None if they are not alike."""
    first = weights[0]
    if not all(first.like(other) for other in weights):
        return None
    form = first.form if all(weight.form == first.form for weight in weights) else WIDE
    zeros = None
    if form == WIDE:
        parts = [_wide_groups(weight) for weight in weights]
        groups = torch.cat([scales for scales, _ in parts], dim=1)
        zeros = _unusual(torch.cat([own for _, own in parts], dim=1), first.bits)
    else:
        groups = torch.cat([weight.groups for weight in weights], dim=1)
    return replace(
        first,
        words=torch.cat([weight.words for weight in weights]),
        groups=groups,
        arrived=torch.cat([weight.arrived for weight in weights]),
        form=form,
        zeros=zeros,
    )


def product(
    x: torch.Tensor,  # [T, K]
    weight: CodedWeight,  # [N, K]
    bias: torch.Tensor | None,  # [N]
    *,
    shape: ProductShape | None = None,
    split: int | None = None,
) -> torch.Tensor:
    """x W^T + b: [T, N], in the dtype of x.

    Args:
        shape: by the number of rows if None.
        split: programs that share the inputs of an output; None fills the device.
    """
    out = x.new_empty(len(x), weight.outputs)
    _launch(x, weight, bias, out, 1.0, add=False, shape=shape, split=split)
    return out


def add_product(
    x: torch.Tensor,  # [T, K]
    weight: CodedWeight,  # [N, K]
    bias: torch.Tensor | None,  # [N]
    hidden: torch.Tensor,  # [T, N]
    *,
    residual_scale: float = 1.0,
    shape: ProductShape | None = None,
    split: int | None = None,
) -> None:
    """hidden += residual_scale * (x W^T + b), in place. ``shape`` and ``split`` as in `product`."""
    _launch(x, weight, bias, hidden, residual_scale, add=True, shape=shape, split=split)


def _launch(
    x: torch.Tensor,
    weight: CodedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    factor: float,
    *,
    add: bool,
    shape: ProductShape | None,
    split: int | None,
) -> None:
    rows, inputs = x.shape
    assert inputs == weight.inputs and out.shape == (rows, weight.outputs)
    if not rows:
        return
    x = x.contiguous() if weight.order is None else x.index_select(1, weight.order)
    assert out.is_contiguous()
    shape = shape or shape_for(rows, x.dtype, shared_bytes(x.device))
    blocks, row_blocks = -(-inputs // DEPTH), triton.cdiv(rows, shape.rows)
    tiles = triton.cdiv(weight.outputs, shape.columns)
    if split is None:
        alone = not shape.splits or row_blocks > 1
        split = 1 if alone else parts_of(tiles, blocks, _cores(x.device))
    assert split == 1 or row_blocks == 1
    sums = out
    if split > 1:
        sums = torch.empty(split, *out.shape, dtype=torch.float32, device=out.device)
    kernels.coded_product[(tiles, split, row_blocks)](
        x,
        weight.words,
        weight.groups,
        weight.groups if weight.zeros is None else weight.zeros,
        weight.groups if weight.table is None else weight.table,
        x if bias is None else bias,
        out,
        sums,
        weight.arrived,
        rows,
        factor,
        BIAS=bias is not None,
        ADD=add,
        SPLIT=split,
        **_constants(weight),
        **_options(shape),
    )


def shape_for(rows: int, dtype: torch.dtype, shared: int = WIDE_BYTES) -> ProductShape:
    """The tile for so many rows, where a program has at most ``shared`` bytes of shared memory."""
    if dtype == torch.float32:
        return PRECISE
    if rows <= FEW.rows:
        return FEW
    if shared < WIDE_BYTES:
        return TIGHT
    return SOME if rows <= SOME.rows else MANY


def parts_of(tiles: int, blocks: int, cores: int) -> int:
    """How many programs share the inputs of an output, so that all multiprocessors are busy."""
    wanted = min(cores * PROGRAMS_PER_CORE // tiles, blocks // LEAST_BLOCKS, MOST_PARTS)
    # Each part has as many blocks as the first: a part less may take no longer.
    each = -(-blocks // max(wanted, 1))
    return -(-blocks // each)


def _constants(weight: CodedWeight) -> dict[str, Any]:
    strides = {part.stride(0) for part in (weight.groups, weight.zeros) if part is not None}
    assert len(strides) == 1 and weight.words.is_contiguous()
    return {
        "INPUTS": weight.inputs,
        "OUTPUTS": weight.outputs,
        "ROW_WORDS": weight.words.shape[1],
        "DEPTH": DEPTH,
        "SPANS": DEPTH // math.gcd(weight.group, DEPTH),
        "GROUP": weight.group,
        "GROUPS": len(weight.groups),
        "GROUP_STRIDE": strides.pop(),
        "KIND": weight.kind,
        "BITS": weight.bits,
        "FORM": weight.form,
        "MIDDLE": MIDDLES[weight.bits],
        "ZEROS": weight.zeros is not None,
    }


def _options(shape: ProductShape) -> dict[str, Any]:
    sizes = {"ROWS": shape.rows, "COLUMNS": shape.columns}
    return {**sizes, "num_warps": shape.warps, "num_stages": shape.stages}


@cache
def _cores(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    cores: int = torch.cuda.get_device_properties(device).multi_processor_count
    return cores


@cache
def shared_bytes(device: torch.device) -> int:
    """The shared memory that a program on the device may have at most."""
    if device.type != "cuda":
        return WIDE_BYTES
    properties = torch.cuda.get_device_properties(device)
    # Some versions of torch only say what a program has without asking for more.
    return int(getattr(properties, "shared_memory_per_block_optin", 48 << 10))


def _codes_of(weight: Grouped) -> tuple[int, torch.Tensor, torch.Tensor] | None:
    """The kind of codes, the codes [N, K] uint8, and zero points [N, G]; None without a kernel."""
    values = weight.values
    if weight.least is not None:
        return None
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    if weight.table is not None:
        simple = weight.bits == 4 and weight.zero is None and len(weight.table) == 16
        return (TABLE, values, zero) if simple else None
    if values.dtype == torch.float8_e4m3fn:
        octets = values.contiguous().view(torch.uint8)
        nan = bool(((octets & 0x7F) == 0x7F).any())
        large = bool((weight.scale.abs() >= LARGEST_E4M3_SCALE).any())
        return None if weight.zero is not None or nan or large else (E4M3, octets, zero)
    if values.dtype == torch.int8:
        return INTEGER, values.contiguous().view(torch.uint8) ^ 0x80, zero + 128
    if values.dtype != torch.uint8 or weight.bits > 8:
        return None
    return INTEGER, values, zero


def _groups_of(
    scales: torch.Tensor, zero: torch.Tensor, bits: int, kind: int
) -> tuple[int, torch.Tensor, torch.Tensor | None]:
    """The form of scales [G, N], these with zero points if they have 16 bits, and others."""
    for form in (HALF, BRAIN):
        narrow = scales.to(FORMS[form])
        if kind != E4M3 and torch.equal(narrow.float(), scales):
            low = narrow.view(torch.int16).int() & 0xFFFF
            return form, low | zero.int() << 16, None
    return WIDE, scales, None if kind != INTEGER else _unusual(zero.float(), bits)


def _wide_groups(weight: CodedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [G, N] in fp32."""
    if weight.form != WIDE:
        low = (weight.groups & 0xFFFF).to(torch.int16).view(FORMS[weight.form])
        return low.float(), (weight.groups >> 16).float()
    if weight.zeros is not None:
        return weight.groups, weight.zeros
    return weight.groups, torch.full_like(weight.groups, MIDDLES[weight.bits])


def _unusual(zero: torch.Tensor, bits: int) -> torch.Tensor | None:
    return zero if bool((zero != MIDDLES[bits]).any()) else None


def _turned(groups: torch.Tensor) -> torch.Tensor:
    """[N, G] -> [G, N] with the strides of its shape, also where G is 1."""
    return groups.T.clone(memory_format=torch.contiguous_format)
