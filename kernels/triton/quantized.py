"""Products with weights of 4 and 8 bits that stay so in memory.

A weight is (number - zero) * scale or table[code] * scale. Rows are not rounded, and sums are in
fp32. Three ways lead to a product:

* Up to `MOST_ROWS` rows of 16 bits take `coded_columns`. Its numbers are exact, and scales multiply
  sums, so that a weight is not rounded at all.
* Codes that it does not read (tables, groups of odd sizes), and fp32, take `coded_product`, which
  rounds each weight once to the dtype of the rows (as `Grouped.dense`, rounded).
* More rows are bound by computation. For them the whole weight is made, rounded once, and torch
  multiplies by it. If they are to be rounded (`with_rounded_rows`), torch multiplies them in fp8.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton

from rayfin.kernels.grouped import E2M1 as E2M1_TABLE
from rayfin.kernels.grouped import Grouped
from rayfin.kernels.triton.device import quant_kernels as kernels
from rayfin.kernels.triton.scaled import ScaledWeight, scaled_product, scales_of
from rayfin.kernels.triton.trials import EIGHT_ROWS, MORE_PARTS, trials

INTEGER, E4M3, TABLE = (kind.value for kind in (kernels.INTEGER, kernels.E4M3, kernels.TABLE))
E2M1 = kernels.E2M1.value
WIDE, HALF, BRAIN = (form.value for form in (kernels.WIDE, kernels.HALF, kernels.BRAIN))
EXPONENT = kernels.EXPONENT.value
FORMS = {WIDE: torch.float32, HALF: torch.float16, BRAIN: torch.bfloat16}
DEPTH = 128
"""Inputs of a block: a program multiplies so many at once."""

SHALLOW = 64
"""The same where groups are half as long as those of `DEPTH` may be: 16 inputs of 4 bits."""

MIDDLES = {4: 8, 8: 128}
"""Zero points of codes that need none of their own, by bits."""

E4M3_FACTOR = 2.0**120
"""On scales of e4m3, whose bits the kernel reads as those of fp32 (`numbers_of`)."""

LARGEST_E4M3_SCALE = 128.0

PROGRAMS_PER_CORE = 3
"""Programs of `coded_product` that a multiprocessor needs to keep memory busy."""

MOST_PARTS = 16

LEAST_BLOCKS = 4
"""Blocks of inputs at least that a program sums: fewer cost more to add up than they gain."""

MOST_ROWS = 128
"""Rows up to which products with codes are faster than making the weight whole.

On an H200 256 rows of the 8B shape's gate and up took 160 us with codes and 187 with the whole
weight, those of down 132 and 100.
"""

MOST_TABLE_ROWS = 64
"""The same of `coded_product`."""

SCALED_ROWS = 65
"""Rows from which on they are rounded if at all (`with_rounded_rows`). No GPU has timed it yet."""


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The sizes of a program's tile."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int = PROGRAMS_PER_CORE  # of a multiprocessor; parts of the inputs make so many


FEW = ProductShape(rows=16, columns=64, warps=4, stages=5)
"""Of `coded_product`, for rows of a decode step: the smallest tile of a tensor core."""

SOME = ProductShape(rows=64, columns=64, warps=4, stages=4)

TIGHT = ProductShape(rows=64, columns=64, warps=4, stages=3)
"""For rows above `FEW`, where a program has less shared memory than ``WIDE_BYTES``."""

WIDE_BYTES = 160 << 10
"""Shared memory of devices on which all shapes fit: sm_80, and sm_90 and its successors.

Others, such as sm_86, sm_89 and sm_120, have 99 KiB.
"""

PRECISE = ProductShape(rows=16, columns=16, warps=8, stages=2)
"""Of `coded_product`, for float32, which tensor cores do not multiply."""

SHORT = 8192
"""Outputs up to which products of many rows take smaller tiles, for want of programs."""

COLUMNS = (  # of `coded_columns`, by rows: where outputs are few, and where they are many
    (ProductShape(16, 128, 4, 4, programs=2), ProductShape(16, 128, 4, 4)),
    (ProductShape(32, 128, 4, 4, programs=2), ProductShape(32, 128, 4, 4)),
    (ProductShape(64, 64, 4, 4, programs=2), ProductShape(64, 128, 4, 3, programs=1)),
    (ProductShape(128, 64, 4, 3, programs=2), ProductShape(128, 128, 8, 3, programs=1)),
)
"""Chosen on an H200 (docs/benchmarks/gpu.md)."""

EIGHT = ProductShape(8, 128, 4, 4)
"""Of `coded_columns`, for up to 8 rows: tensor cores then take a tile without waiting for it."""


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight [N, K] of codes on a device, in the order of the kernel."""

    words: torch.Tensor  # [N, W] int32: codes of successive inputs, padded to blocks of DEPTH
    # A scale in 16 bits and a zero point above in int32; scales in fp32; their exponents in uint8.
    groups: torch.Tensor  # [G, N]
    arrived: torch.Tensor  # [N] int32 zeros, counters of programs
    inputs: int  # K
    group: int  # inputs that share a scale
    bits: int  # of a code: 4 or 8
    kind: int
    form: int  # of scales
    zeros: torch.Tensor | None = None  # [G, N] fp32 beside scales in fp32; None: the usual one
    table: torch.Tensor | None = None  # [16] fp32
    order: torch.Tensor | None = None  # [K] int64: input i of the kernel is x[:, order[i]]
    parted: bool = False  # codes are in the order of `coded_columns` (`_in_parts`)
    depth: int = DEPTH  # inputs of a block
    scaled: ScaledWeight | None = None  # for products of many rows that are rounded to fp8

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

        mine, theirs = (
            (w.kind, w.bits, w.group, w.inputs, w.parted, w.depth) for w in (self, other)
        )
        return mine == theirs and equal(self.order, other.order) and equal(self.table, other.table)

    def part(self, start: int, count: int) -> "CodedWeight":
        """Some of the outputs, without a copy."""
        end = start + count
        zeros = None if self.zeros is None else self.zeros[:, start:end]
        some = replace(
            self,
            words=self.words[start:end],
            groups=self.groups[:, start:end],
            arrived=self.arrived[start:end],
            zeros=zeros,
            scaled=None,
        )
        return some if self.scaled is None else with_rounded_rows(some)


def pack_weight(weight: Grouped, dtype: torch.dtype = torch.float32) -> CodedWeight | None:
    """The weight on its device for rows of ``dtype``, or None if no kernel reads such codes."""
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
    depth = DEPTH if group % (DEPTH * bits // 16) == 0 else SHALLOW
    part = depth * bits // 16
    parted = dtype.itemsize == 2 and group % part == 0
    table = None if weight.table is None else weight.table.float().contiguous()
    factor = None if table is None else _factor_of_e2m1(table)
    if parted and factor is not None:
        kind, table = E2M1, None
    elif table is not None:
        parted = False
    depth = depth if parted else DEPTH
    codes = torch.nn.functional.pad(codes, (0, padded - inputs))
    codes = (_in_parts(codes, depth, part) if parted else codes).view(outputs, -1, each)
    words = codes[:, :, 0].int()
    for i in range(1, each):
        words |= codes[:, :, i].int() << (bits * i)
    scales = weight.scale.float()
    if kind == E4M3:
        scales = scales * E4M3_FACTOR
    if kind == E2M1 and factor is not None and factor != 1.0:
        scales = scales * factor
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
        table=table,
        order=weight.order,
        parted=parted,
        depth=depth,
    )


def _factor_of_e2m1(table: torch.Tensor) -> float | None:
    """By what E2M1's numbers are multiplied in a table (NVFP4's scale of all), or None."""
    factor = 2.0 * float(table[1])
    wanted = torch.tensor(E2M1_TABLE, device=table.device) * factor
    return factor if torch.allclose(table, wanted, rtol=1e-6, atol=0.0) else None


def _in_parts(codes: torch.Tensor, depth: int, part: int) -> torch.Tensor:
    """Codes [N, K] in an order in which those of a half word are ``part`` inputs apart.

    So `coded_columns` takes successive inputs of a block from one place of its half words.
    """
    parts = codes.view(len(codes), -1, depth // part, part)
    return parts.transpose(2, 3).reshape(codes.shape)


def with_rounded_rows(weight: CodedWeight) -> CodedWeight:
    """Makes a weight round many rows, if it is of e4m3 with scales that torch's product takes."""
    blocks = weight.words.shape[1] * 4 // DEPTH
    fits = weight.group == DEPTH or len(weight.groups) == 1
    if weight.kind != E4M3 or not weight.parted or weight.order is not None or not fits:
        return weight
    scales = scales_of(weight.groups / E4M3_FACTOR)
    if scales is None or len(weight.groups) not in (1, blocks):
        return weight
    numbers = weight.words.view(torch.float8_e4m3fn)
    return replace(weight, scaled=ScaledWeight(numbers, *scales))


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
        zeros = _unusual(torch.cat([zero_points for _, zero_points in parts], dim=1), first.bits)
    else:
        groups = torch.cat([weight.groups for weight in weights], dim=1)
    whole = replace(
        first,
        words=torch.cat([weight.words for weight in weights]),
        groups=groups,
        arrived=torch.cat([weight.arrived for weight in weights]),
        form=form,
        zeros=zeros,
        scaled=None,
    )
    return whole if first.scaled is None else with_rounded_rows(whole)


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
    x = _ordered(x, weight)
    if shape is None and (scaled := scaled_for(weight, len(x))) is not None:
        y = scaled_product(x, scaled)
        return y if bias is None else y + bias
    if shape is None and len(x) > most_rows(weight, x):
        return F.linear(x, widened(weight, x.dtype), bias)
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
    x = _ordered(x, weight)
    if shape is None and (scaled := scaled_for(weight, len(x))) is not None:
        y = scaled_product(x, scaled)
        hidden.add_(y if bias is None else y + bias, alpha=residual_scale)
    elif shape is not None or len(x) <= most_rows(weight, x):
        _launch(x, weight, bias, hidden, residual_scale, add=True, shape=shape, split=split)
    elif bias is None:
        hidden.addmm_(x, widened(weight, x.dtype).T, alpha=residual_scale)
    else:
        hidden.add_(F.linear(x, widened(weight, x.dtype), bias), alpha=residual_scale)


def widened(weight: CodedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weights [N, K], each rounded once to a dtype; inputs are in the order of the kernel."""
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.words.device)
    codes = weight.words.view(torch.int16) if weight.parted else weight.words
    rows, count = 4, 256
    grid = (triton.cdiv(weight.outputs, rows), triton.cdiv(codes.shape[1], count))
    kernels.widen_codes[grid](
        codes,
        weight.groups,
        weight.groups if weight.zeros is None else weight.zeros,
        weight.groups if weight.table is None else weight.table,
        out,
        **_constants(weight),
        OUTPUTS=weight.outputs,
        ROW_CODES=codes.shape[1],
        PART=weight.depth * weight.bits // 16 if weight.parted else 1,
        ROWS=rows,
        COUNT=count,
        num_warps=4,
    )
    return out


def scaled_for(weight: CodedWeight, rows: int) -> ScaledWeight | None:
    """Returns what multiplies so many rows if they are rounded; None if they are not."""
    return weight.scaled if rows >= SCALED_ROWS else None


def most_rows(weight: CodedWeight, x: torch.Tensor) -> int:
    """Rows up to which a product with codes is faster than with the whole weight."""
    if not weight.parted:
        return MOST_TABLE_ROWS
    if x.dtype.itemsize != 2:
        return 0
    return MOST_ROWS if shared_bytes(x.device) >= WIDE_BYTES else MOST_ROWS // 2


def _ordered(x: torch.Tensor, weight: CodedWeight) -> torch.Tensor:
    assert x.shape[1] == weight.inputs
    return x.contiguous() if weight.order is None else x.index_select(1, weight.order)


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
    if not rows:
        return
    shape = shape or shape_for(rows, weight, x.dtype, shared_bytes(x.device))
    assert out.shape == (rows, weight.outputs) and out.is_contiguous()
    blocks, row_blocks = -(-inputs // weight.depth), triton.cdiv(rows, shape.rows)
    tiles = triton.cdiv(weight.outputs, shape.columns)
    if split is None:
        split = parts_of(tiles, blocks, _cores(x.device) * shape.programs)
        split = 1 if row_blocks > 1 else split
    assert split == 1 or row_blocks == 1
    sums = out
    if split > 1:
        sums = torch.empty(split, *out.shape, dtype=torch.float32, device=out.device)
    zeros = weight.groups if weight.zeros is None else weight.zeros
    bias_or_any = x if bias is None else bias
    results = (bias_or_any, out, sums, weight.arrived, rows, factor)
    options: dict[str, Any] = {
        **block_constants(weight),
        "OUTPUTS": weight.outputs,
        "BIAS": bias is not None,
        "ADD": add,
        "SPLIT": split,
        "ROWS": shape.rows,
        "COLUMNS": shape.columns,
        "num_warps": shape.warps,
    }
    grid = (tiles, split, row_blocks)
    if weight.parted:
        codes = weight.words.view(torch.int16)
        kernels.coded_columns[grid](
            x,
            codes,
            weight.groups,
            zeros,
            *results,
            **options,
            ROW_CODES=codes.shape[1],
            STAGES=shape.stages,
            PAIRS=has_ptx(x.device),
        )
        return
    kernels.coded_product[grid](
        x,
        weight.words,
        weight.groups,
        zeros,
        weight.groups if weight.table is None else weight.table,
        *results,
        **options,
        ROW_WORDS=weight.words.shape[1],
        num_stages=shape.stages,
    )


def shape_for(
    rows: int, weight: CodedWeight, dtype: torch.dtype, shared: int = WIDE_BYTES
) -> ProductShape:
    """The tile for so many rows, where a program has at most ``shared`` bytes of shared memory."""
    if weight.parted:
        if rows <= EIGHT.rows and EIGHT_ROWS in trials():
            return EIGHT
        shapes = next((pair for pair in COLUMNS if rows <= pair[0].rows), COLUMNS[-1])
        small = COLUMNS[2][0]
        narrow = weight.kind == E2M1 or shared < WIDE_BYTES
        spills = shapes is COLUMNS[2] or (shapes is COLUMNS[3] and narrow)
        if spills and weight.group < DEPTH // 2:  # many scales, for which no registers are left
            shapes = (small, small)
        if shared < WIDE_BYTES:
            # Two stages leave no block on its way while one is waited for; four halve the programs.
            return replace(shapes[0], stages=3)
        return shapes[weight.outputs > SHORT]
    if dtype == torch.float32:
        return PRECISE
    if rows <= FEW.rows:
        return FEW
    return TIGHT if shared < WIDE_BYTES else SOME


def parts_of(tiles: int, blocks: int, programs: int) -> int:
    """How many programs share the inputs of an output, so that there are about ``programs``."""
    share = -(-programs // tiles) if MORE_PARTS in trials() else programs // tiles
    wanted = min(share, blocks // LEAST_BLOCKS, MOST_PARTS)
    # Each part has as many blocks as the first: a part less may take no longer.
    each = -(-blocks // max(wanted, 1))
    return -(-blocks // each)


def _constants(weight: CodedWeight) -> dict[str, Any]:
    strides = {part.stride(0) for part in (weight.groups, weight.zeros) if part is not None}
    assert len(strides) == 1 and weight.words.is_contiguous()
    return {
        "INPUTS": weight.inputs,
        "GROUP": weight.group,
        "GROUP_STRIDE": strides.pop(),
        "KIND": weight.kind,
        "BITS": weight.bits,
        "FORM": weight.form,
        "MIDDLE": MIDDLES[weight.bits],
        "ZEROS": weight.zeros is not None,
    }


def block_constants(weight: CodedWeight) -> dict[str, Any]:
    """Returns what kernels that multiply blocks of inputs know of a weight."""
    return {
        **_constants(weight),
        "GROUPS": len(weight.groups),
        "DEPTH": weight.depth,
        "SPANS": weight.depth // math.gcd(weight.group, weight.depth),
    }


def has_ptx(device: torch.device) -> bool:
    """Returns whether kernels on the device may have NVIDIA's instructions."""
    return device.type == "cuda" and torch.version.hip is None


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
    if kind == E2M1 and (exponents := _exponents_of(scales)) is not None:
        return EXPONENT, exponents, None
    for form in (HALF, BRAIN):
        narrow = scales.to(FORMS[form])
        if kind not in (E4M3, E2M1) and torch.equal(narrow.float(), scales):
            low = narrow.view(torch.int16).int() & 0xFFFF
            return form, low | zero.int() << 16, None
    return WIDE, scales, None if kind != INTEGER else _unusual(zero.float(), bits)


def _exponents_of(scales: torch.Tensor) -> torch.Tensor | None:
    """Returns powers of two as exponents of 8 bits (e8m0); None if some are none."""
    bits = scales.view(torch.int32)
    exponents = (bits >> 23).clamp(min=0)
    wanted = torch.where(exponents > 0, exponents << 23, kernels.LEAST_EXPONENT.value)
    is_exact = torch.equal(wanted, bits) and bool(scales.isfinite().all())
    return exponents.to(torch.uint8) if is_exact else None


def _wide_groups(weight: CodedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [G, N] in fp32."""
    if weight.form == EXPONENT:
        bits = (weight.groups.int() << 23).clamp(min=kernels.LEAST_EXPONENT.value)
        scales = bits.view(torch.float32)
        return scales, torch.full_like(scales, MIDDLES[weight.bits])
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
