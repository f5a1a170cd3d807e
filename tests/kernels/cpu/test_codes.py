"""Weights of 4 and 8 bits against the same weights widened: the same bits, but on matrix tiles."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.cpu.codes import (
    CodedMatrix,
    Codes,
    cut_codes,
    pack_codes,
    pack_int4,
    pack_int8,
    round_int8,
    round_levels,
    stack_codes,
)
from rayfin.kernels.cpu.kernels import Activation, CpuKernels
from rayfin.kernels.cpu.library import ISAS
from rayfin.kernels.grouped import E2M1, Grouped, SharedScales

KINDS = ("int4", "int4 zeros", "int8", "int8 zeros", "bytes", "fp8", "table", "fp4")
KINDS += ("levels4", "levels8")
ROWS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 49, 70])
SIZES = st.integers(1, 150)
GROUPS = st.sampled_from([1, 3, 8, 16, 20, 32, 64, 128, 1000])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def drawn(kind: str, outputs: int, inputs: int, group: int, seed: int = 0) -> Grouped:
    random = torch.Generator().manual_seed(seed)
    group = min(group, inputs)
    shape = outputs, -(-inputs // group)
    scale = torch.rand(shape, generator=random) + 0.1
    codes = torch.randint(0, 256, (outputs, inputs), generator=random, dtype=torch.uint8)
    if kind == "fp8":
        codes = torch.where((codes & 0x7F) == 0x7F, codes - 1, codes)
        return Grouped(codes.view(torch.float8_e4m3fn), scale, group, 8)
    if kind == "bytes":
        return Grouped(codes.view(torch.int8), scale, group, 8)
    bits = 8 if kind.startswith("int8") or kind == "levels8" else 4
    codes &= 2**bits - 1
    if kind.startswith("levels"):
        scale = (scale * 2**12).round() / 2**12  # its product with a code is exact
        return Grouped(codes, scale, group, bits, least=normal(*shape, seed=seed))
    if kind == "fp4":
        scale = 2.0 ** torch.randint(-9, 9, shape, generator=random)
        return Grouped(codes, scale, group, bits, table=torch.tensor(E2M1))
    if kind == "table":
        return Grouped(codes, scale, group, bits, table=normal(16, seed=seed))
    zero = torch.full(shape, 2 ** (bits - 1), dtype=torch.int32)
    if kind.endswith("zeros"):
        zero = torch.randint(0, 2**bits + 1, shape, generator=random, dtype=torch.int32)
    return Grouped(codes, scale, group, bits, zero)


def packed(kernels: CpuKernels, weight: Grouped) -> CodedMatrix:
    matrix = pack_codes(kernels, weight)
    assert matrix is not None
    return matrix


EVERY_ISA = pytest.mark.thorough(reason="`make test` has the best instruction set")
SETUPS = [*(pytest.param((isa, 1), marks=EVERY_ISA) for isa in ISAS), (None, 1), (None, 3)]


@pytest.fixture(scope="module", params=SETUPS, ids=str)
def kernels(
    request: pytest.FixtureRequest, make_kernels: Callable[[str | None, int], CpuKernels]
) -> CpuKernels:
    return make_kernels(*request.param)


def check(kernels: CpuKernels, x: torch.Tensor, weight: Grouped) -> None:
    actual = kernels.matmul(x, packed(kernels, weight))
    expected = reference.matmul_grouped(x, weight)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    tiles = kernels.library._name.rpartition("/")[2].startswith("_amx")
    if not tiles:  # they sum in another order
        wide = kernels.pack([weight.dense()], storage=torch.float32)
        assert torch.equal(actual, kernels.matmul(x, wide))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=12)
@given(rows=ROWS, outputs=SIZES, inputs=SIZES, group=GROUPS, seed=st.integers(0, 99))
def test_any_shape(
    kernels: CpuKernels, kind: str, rows: int, outputs: int, inputs: int, group: int, seed: int
) -> None:
    x = normal(rows, inputs, seed=seed + 1)
    check(kernels, x, drawn(kind, outputs, inputs, group, seed))


@pytest.mark.parametrize("kind", ["int4", "int4 zeros", "fp8", "fp4", "levels4"])
@pytest.mark.parametrize("rows", [1, 4, 5, 60, 300])
@pytest.mark.parametrize("inputs, group", [(576, 64), (1536, 128), (1537, 1537), (1100, 20)])
def test_large(kernels: CpuKernels, kind: str, rows: int, inputs: int, group: int) -> None:
    check(kernels, normal(rows, inputs), drawn(kind, 300, inputs, group))


@pytest.mark.parametrize("rows", [1, 3, 30])
def test_inputs_in_another_order(kernels: CpuKernels, rows: int) -> None:
    """As GPTQ stores them that quantises the largest activations first."""
    plain, x = drawn("int4 zeros", 70, 192, 64), normal(rows, 192)
    order = torch.randperm(192, generator=torch.Generator().manual_seed(4))
    weight = Grouped(plain.values, plain.scale, 64, 4, plain.zero, order=order)
    matrix = packed(kernels, weight)
    expected = reference.matmul_grouped(x, weight)
    torch.testing.assert_close(kernels.matmul(x, matrix), expected, rtol=1e-4, atol=1e-2)
    assert torch.equal(
        kernels.matmul(x, matrix), kernels.matmul(x[:, order], packed(kernels, plain))
    )
    assert torch.equal(matrix.rows(torch.tensor([69, 3])), weight.dense()[[69, 3]])


def test_a_row_is_the_same_in_any_company(kernels: CpuKernels) -> None:
    x, matrix = normal(200, 700), packed(kernels, drawn("int4 zeros", 70, 700, 128))
    every = kernels.matmul(x, matrix)
    for rows in (1, 2, 4, 5, 6, 7, 12, 13, 50):
        assert torch.equal(kernels.matmul(x[:rows], matrix), every[:rows])


@pytest.mark.parametrize("rows", [1, 2, 9])
def test_epilogues(kernels: CpuKernels, rows: int) -> None:
    gate, up = (drawn("int4", 90, 64, 32, seed=seed) for seed in (1, 2))
    x, bias = normal(rows, 64) * 0.1, normal(180)
    merged = torch.cat([reference.matmul_grouped(x, one) for one in (gate, up)], 1) + bias
    halves = [packed(kernels, gate), packed(kernels, up)]
    paired = stack_codes(kernels, halves, paired=True)
    actual = kernels.matmul(x, paired, bias=bias, activation=Activation.SILU)
    torch.testing.assert_close(actual, reference.silu_mul(merged), rtol=1e-4, atol=1e-3)
    residual = normal(rows, 180)
    expected = residual + 0.3 * merged
    kernels.matmul(
        x, stack_codes(kernels, halves), bias=bias, residual=residual, alpha=0.3, out=residual
    )
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-3)


def test_packed_as_pairs(kernels: CpuKernels) -> None:
    weight, x = drawn("fp4", 90, 64, 32), normal(3, 64)
    paired = pack_codes(kernels, weight, paired=True)
    stacked = stack_codes(kernels, [packed(kernels, weight)], paired=True)
    assert paired is not None and paired.columns == 45
    assert torch.equal(kernels.matmul(x, paired), kernels.matmul(x, stacked))


def test_stacked(kernels: CpuKernels) -> None:
    """Zero points of some are zeros of the others."""
    parts = [drawn(kind, n, 96, 32, seed=n) for kind, n in (("int4", 33), ("int4 zeros", 18))]
    stacked = stack_codes(kernels, [packed(kernels, part) for part in parts])
    assert torch.equal(stacked.rows(torch.arange(51)), torch.cat([p.dense() for p in parts]))
    parts = [drawn("levels4", n, 96, 32, seed=n) for n in (33, 18)]
    stacked = stack_codes(kernels, [packed(kernels, part) for part in parts])
    assert torch.equal(stacked.rows(torch.arange(51)), torch.cat([p.dense() for p in parts]))


def test_what_is_alike(kernels: CpuKernels) -> None:
    one = packed(kernels, drawn("int4", 8, 64, 32))
    assert one.like(packed(kernels, drawn("int4 zeros", 9, 64, 32)))
    for kind, group in (("int4", 64), ("int8", 32), ("table", 32), ("levels4", 32)):
        other = drawn(kind, 8, 64, group)
        assert not one.like(packed(kernels, other))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_read_back(kernels: CpuKernels, kind: str) -> None:
    weight = drawn(kind, 70, 33, 16)
    chosen = torch.tensor([69, 0, 33, 31])
    assert torch.equal(packed(kernels, weight).rows(chosen), weight.dense()[chosen])


def test_all_numbers_of_e4m3(kernels: CpuKernels) -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    weight = Grouped(codes.view(1, -1).view(torch.float8_e4m3fn), torch.ones(1, 1), 254, 8)
    rows = packed(kernels, weight).rows(torch.tensor([0]))
    assert torch.equal(rows, weight.values.float())


def test_all_numbers_of_e2m1(kernels: CpuKernels) -> None:
    """At scales from the smallest to the largest; a smaller one is fp32."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(4, 2)
    weight = Grouped(codes, torch.empty(4, 1), 32, 4, table=torch.tensor(E2M1))
    x = torch.eye(32)
    for exponents, kind in (
        ((-101, -3, 0, 125), Codes.FP4),
        ((-102, -3, 0, 1), Codes.TABLE4),
    ):
        weight.scale.copy_(2.0 ** torch.tensor(exponents).view(4, 1))
        matrix = packed(kernels, weight)
        assert matrix.codes == kind
        for rows in (1, 4, 32):
            assert torch.equal(kernels.matmul(x[:rows], matrix), weight.dense().T[:rows])
    weight.scale.copy_(torch.full((4, 1), 0.75))
    assert packed(kernels, weight).codes == Codes.TABLE4


def test_odd_rows_stay_alone(kernels: CpuKernels) -> None:
    matrix, x = packed(kernels, drawn("int4", 40, 64, 32)), normal(14, 64)
    expected = kernels.matmul(x, matrix)
    x[3, 5], x[8, 2] = float("nan"), float("inf")
    out = kernels.matmul(x, matrix)
    fine = [row for row in range(14) if row not in (3, 8)]
    assert torch.equal(out[fine], expected[fine]) and not out[[3, 8]].isfinite().all()


def test_codes_that_are_not_read(kernels: CpuKernels) -> None:
    nan = torch.full((4, 8), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert pack_codes(kernels, Grouped(nan, torch.ones(4, 1), 8, 8)) is None
    ones = torch.ones(4, 8).to(torch.float8_e4m3fn)
    assert pack_codes(kernels, Grouped(ones, torch.full((4, 1), 200.0), 8, 8)) is None


def test_bytes(kernels: CpuKernels) -> None:
    matrix = packed(kernels, drawn("int4", 64, 128, 64))
    assert (matrix.bytes, matrix.codes) == (64 * 64 + 64 * 2 * 4, Codes.INT4)
    matrix = packed(kernels, drawn("fp4", 64, 128, 32))
    assert (matrix.bytes, matrix.codes) == (64 * 64 + 64 * 4, Codes.FP4)
    matrix = packed(kernels, drawn("levels8", 64, 128, 32))
    assert (matrix.bytes, matrix.codes) == (64 * 128 + 64 * 4 * 8, Codes.LEVELS8)


ROUNDED = {
    "int4": Codes.INT4,
    "int4 zeros": Codes.INT4,
    "levels4": Codes.LEVELS4,
    "table": Codes.TABLE4,
    "bytes": Codes.INT8,
    "int8": Codes.INT8,
    "int8 zeros": Codes.INT8,
    "int6": Codes.INT6,
    "levels6": Codes.LEVELS6,
}
"""Kinds of numbers that rows are rounded for, and how they are stored then."""


def drawn_integers(kind: str, outputs: int, inputs: int, group: int) -> Grouped:
    """A weight of a kind; its table is one of signed bytes, and 6 bits are what 8 are stored in."""
    if kind == "int6":
        plain = drawn("bytes", outputs, inputs, group)
        return replace(plain, values=plain.values % 64 - 32)
    if kind == "levels6":
        plain = drawn("levels8", outputs, inputs, group)
        return replace(plain, values=plain.values % 64)
    plain = drawn(kind, outputs, inputs, group)
    if kind == "table":
        random = torch.Generator().manual_seed(0)
        table = torch.randint(-128, 128, (16,), generator=random).float()
        return replace(plain, table=table)
    if kind == "bytes":
        plain.values[0, 0] = -128
    return plain


@settings(max_examples=12)
@given(
    rows=ROWS,
    outputs=SIZES,
    inputs=SIZES,
    group=GROUPS,
    vnni=st.booleans(),
)
@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_rows(
    kernels: CpuKernels, rows: int, outputs: int, inputs: int, group: int, kind: str, vnni: bool
) -> None:
    weight = drawn_integers(kind, outputs, inputs, group)
    x = normal(rows, inputs)
    kernels.library.rayfin_pool_use_vnni(kernels.pool, vnni)
    matrix = pack_codes(kernels, weight, round_rows=True)
    assert matrix is not None and (matrix.rounds_rows, matrix.codes) == (True, ROUNDED[kind])
    actual, expected = kernels.matmul(x, matrix), reference.matmul_rounded(x, weight)
    kernels.library.rayfin_pool_use_vnni(kernels.pool, True)
    largest = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("kind", ["int4 zeros", "int8 zeros"])
@pytest.mark.parametrize("rows", [1, 5, 60, 300])
def test_rounded_rows_of_large_weights(kernels: CpuKernels, rows: int, kind: str) -> None:
    """In another order of inputs as well; the same bits in any company."""
    plain, x = drawn(kind, 300, 1536, 128), normal(rows, 1536)
    order = torch.randperm(1536, generator=torch.Generator().manual_seed(4))
    weight = replace(plain, order=order)
    matrix = pack_codes(kernels, weight, round_rows=True)
    assert matrix is not None
    actual = kernels.matmul(x, matrix)
    expected = reference.matmul_rounded(x, weight)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    assert torch.equal(kernels.matmul(x[:1], matrix), actual[:1])


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_rows_in_any_company(kernels: CpuKernels, kind: str) -> None:
    x = normal(60, 320)
    matrix = pack_codes(kernels, drawn_integers(kind, 70, 320, 16), round_rows=True)
    assert matrix is not None
    every = kernels.matmul(x, matrix)
    for rows in (1, 2, 3, 4, 5, 6, 7, 12, 13):
        assert torch.equal(kernels.matmul(x[:rows], matrix), every[:rows])


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize("code", [-128, -127, -32, 31, 127])
def test_the_largest_products(kernels: CpuKernels, code: int, vnni: bool) -> None:
    """No sum on the way is too large for its bits: all numbers and rows at their ends."""
    group = 1 << 16
    values = torch.full((20, group), code, dtype=torch.int8)
    weight = Grouped(values, torch.ones(20, 1), group, 8)
    matrix = pack_codes(kernels, weight, round_rows=True)
    assert matrix is not None and matrix.rounds_rows
    x = torch.ones(2, group)
    x[1] = -1.0
    kernels.library.rayfin_pool_use_vnni(kernels.pool, vnni)
    expected = torch.tensor([[1.0], [-1.0]]).expand(2, 20) * float(code * group)
    torch.testing.assert_close(kernels.matmul(x, matrix), expected, rtol=1e-5, atol=0)
    kernels.library.rayfin_pool_use_vnni(kernels.pool, True)


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_weights_read_back(kernels: CpuKernels, kind: str) -> None:
    """Stacked and cut as well: they are stored as what rounds rows."""
    weight = drawn_integers(kind, 70, 50, 20)
    matrix = pack_codes(kernels, weight, round_rows=True)
    assert matrix is not None
    chosen = torch.tensor([69, 0, 33, 31])
    assert torch.equal(matrix.rows(chosen), weight.dense()[chosen])
    stacked = stack_codes(kernels, [matrix, matrix])
    assert stacked.rounds_rows and torch.equal(stacked.rows(chosen + 70), weight.dense()[chosen])
    part = cut_codes(kernels, stacked, 70, 40)
    assert part.rounds_rows and torch.equal(part.rows(chosen[1:]), weight.dense()[chosen[1:]])


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", ["int4", "levels4", "int6", "levels6", "bytes", "table"])
@pytest.mark.parametrize("group, span", [(32, 1), (16, 8), (32, 4), (20, 16)])
def test_shared_scales(kernels: CpuKernels, kind: str, group: int, span: int, rounds: bool) -> None:
    """Scales and least numbers in fewer bytes: the same bits."""
    outputs, inputs, random = 41, 340, torch.Generator().manual_seed(3)
    plain, groups = drawn_integers(kind, outputs, inputs, group), -(-inputs // group)

    def halves() -> torch.Tensor:
        drawn = torch.randn(outputs, -(-groups // span), generator=random)
        drawn[0, 0] = 3e-7  # less than a normal one
        return drawn.half()

    def factors() -> torch.Tensor | None:
        drawn = torch.randint(-128, 128, (outputs, groups), generator=random, dtype=torch.int8)
        return None if span == 1 else drawn

    least = (None, None) if plain.least is None else (halves(), factors())
    shared = SharedScales(span, halves(), factors(), *least)
    floats = replace(plain, scale=shared.scales(), least=shared.leasts())
    one, other = (
        pack_codes(kernels, weight, round_rows=rounds)
        for weight in (replace(floats, shared=shared), floats)
    )
    assert one is not None and other is not None and one.bytes < other.bytes
    assert (one.span, other.span) == (span, 0) and not one.like(other)
    assert torch.equal(one.rows(torch.arange(outputs)), floats.dense())
    stacked = stack_codes(kernels, [one, one])
    for rows in (1, 3, 20):
        x = normal(rows, inputs)
        expected = kernels.matmul(x, other)
        assert torch.equal(kernels.matmul(x, one), expected)
        assert torch.equal(kernels.matmul(x, stacked), torch.cat([expected, expected], 1))


def test_shared_scales_that_are_no_numbers(kernels: CpuKernels) -> None:
    shared = SharedScales(1, torch.tensor([[torch.inf]]).half())
    weight = Grouped(torch.ones(1, 8, dtype=torch.int8), shared.scales(), 8, 8, shared=shared)
    matrix = pack_codes(kernels, weight)
    assert matrix is not None and matrix.span == 0


def test_rows_that_are_not_rounded(kernels: CpuKernels) -> None:
    """Of floats, of a table of other numbers, of levels that 6 bits do not hold."""
    for kind in ("fp8", "fp4", "table", "levels8"):
        weight = drawn(kind, 5, 64, 32)
        matrix = pack_codes(kernels, weight, round_rows=True)
        assert matrix is not None and not matrix.rounds_rows
        assert matrix.codes == packed(kernels, weight).codes


@pytest.mark.parametrize("vnni", [True, False])
@pytest.mark.parametrize("kind", ROUNDED)
def test_sums_that_floats_hold(kernels: CpuKernels, kind: str, vnni: bool) -> None:
    """Rows and scales of which all products are exact: the bits of the integers' products."""
    weight = drawn_integers(kind, 37, 200, 40)
    weight.scale.copy_(2.0 ** (2 * weight.scale).round())
    if weight.least is not None:
        weight.least.copy_(weight.least.round())
    x = (40 * normal(14, 200)).round().clamp(-127, 127)
    x[:, ::8] = 127.0  # in each part of a group: 32 inputs and 8
    kernels.library.rayfin_pool_use_vnni(kernels.pool, vnni)
    matrix = pack_codes(kernels, weight, round_rows=True)
    assert matrix is not None
    for rows in (1, 2, 14):
        actual = kernels.matmul(x[:rows], matrix)
        assert torch.equal(actual, reference.matmul_grouped(x[:rows], weight))
    kernels.library.rayfin_pool_use_vnni(kernels.pool, True)


@pytest.mark.parametrize("kind", ["int4", "bytes", "levels6"])
def test_odd_parts_of_rows(kernels: CpuKernels, kind: str) -> None:
    """Zeros and next to nothing are zeros; what is not finite stays in its row."""
    weight, x = drawn_integers(kind, 40, 90, 45), normal(14, 90)
    x[0], x[1], x[2, :40] = 0.0, 1e-36 * x[1], 0.0
    matrix = pack_codes(kernels, weight, round_rows=True)
    assert matrix is not None
    expected = kernels.matmul(x, matrix)
    assert not expected[:2].any() and expected.isfinite().all()
    x[3, 5], x[8, 72] = float("nan"), float("inf")
    out = kernels.matmul(x, matrix)
    fine = [row for row in range(14) if row not in (3, 8)]
    assert torch.equal(out[fine], expected[fine]) and not out[[3, 8]].isfinite().any()


PACKS = {"int8": pack_int8, "int4": pack_int4}


def test_weights_rounded_to_8_bits(kernels: CpuKernels) -> None:
    weight = normal(5, 70)
    weight[0, :40], weight[1] = 0.0, 1e-12
    actual, expected = round_int8(kernels, weight), reference.round_int8(weight, 32)
    assert torch.equal(actual.values, expected.values) and torch.equal(actual.scale, expected.scale)
    assert actual.shared is not None and torch.equal(actual.shared.scales(), actual.scale)


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("shape", [(5, 320), (3, 70), (4, 7)])
def test_weights_rounded_to_levels(kernels: CpuKernels, shape: tuple[int, int], bits: int) -> None:
    """Nearer than levels from the least number to the largest."""
    weight = normal(*shape)
    weight[0, :4] = 0.0
    actual, plain = round_levels(kernels, weight, bits), reference.round_levels(weight, bits, 32)
    error, expected = ((rounded.dense() - weight).norm() for rounded in (actual, plain))
    assert error <= expected * (1.0 if shape[1] > 32 else 1.1)
    assert error > 0.5 * expected and int(actual.values.max()) == 2**bits - 1


@pytest.mark.parametrize("number", [0.0, 0.5, -3e-20])
def test_equal_numbers_stay(kernels: CpuKernels, number: float) -> None:
    weight = torch.full((2, 64), number)
    for rounded in (round_int8(kernels, weight), round_levels(kernels, weight)):
        torch.testing.assert_close(rounded.dense(), weight, rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize("bits", PACKS)
@pytest.mark.parametrize("paired", [False, True])
def test_packed_rounded(kernels: CpuKernels, bits: str, paired: bool) -> None:
    """Several weights, into a view of rows that lie apart, with what comes after the product."""
    weights, many = [normal(41, 292, seed=seed) for seed in (1, 2)], normal(15, 330)
    weights[1] = weights[1].bfloat16().float()
    x, out = many[:, 3:295], torch.zeros(15, 90)
    rounded = [{"int8": round_int8, "int4": round_levels}[bits](kernels, one) for one in weights]
    matrix = PACKS[bits](kernels, [weights[0], weights[1].bfloat16()], paired=paired)
    dense = torch.cat([one.dense() for one in rounded])
    assert matrix.rounds_rows and torch.equal(matrix.rows(torch.arange(82)), dense)
    assert abs(8 * matrix.bytes / dense.numel() - {"int8": 8.55, "int4": 4.77}[bits]) < 0.03
    bias = normal(82)
    merged = torch.cat([reference.matmul_rounded(x, one) for one in rounded], 1) + bias
    expected = reference.silu_mul(merged) if paired else merged
    columns = out[:, 2 : 2 + matrix.columns]
    activation = Activation.SILU if paired else Activation.NONE
    kernels.matmul(x, matrix, bias=bias, activation=activation, out=columns)
    torch.testing.assert_close(columns, expected, rtol=1e-4, atol=1e-4)
    assert not out[:, :2].any() and not out[:, 2 + matrix.columns :].any()
    if not paired:
        exact = x @ torch.cat(weights).T + bias
        error = float((columns - exact).norm() / exact.norm())
        assert error < {"int8": 0.01, "int4": 0.1}[bits]


@pytest.mark.parametrize("inputs", [292, 64, 7])
def test_rows_of_two_bytes(kernels: CpuKernels, inputs: int) -> None:
    """Next to exact; a row is the same in any company."""
    weight, x = normal(41, inputs), normal(40, inputs, seed=1)
    x[3] = 0.0
    matrix = pack_int8(kernels, [weight], row_bytes=2)
    found, expected = kernels.matmul(x, matrix), x @ round_int8(kernels, weight).dense().T
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    for rows in (1, 2, 3, 7, 13):
        assert torch.equal(kernels.matmul(x[:rows], matrix), found[:rows])
