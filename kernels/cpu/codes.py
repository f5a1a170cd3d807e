"""Weights of 4 and 8 bits that stay so in memory, for ``CpuKernels.matmul`` (matmul_codes.h)."""

import weakref
from collections.abc import Callable
from enum import IntEnum
from functools import partial

import torch

from rayfin.kernels.cpu.kernels import CpuKernels, Matrix, Parts, addresses
from rayfin.kernels.grouped import E2M1, Grouped, SharedScales

MAX_INPUTS = 2**31 - 1


class Codes(IntEnum):
    """What the codes of a weight stand for (Storage in matrix.h)."""

    INT4 = 3
    INT8 = 4
    FP8 = 5
    TABLE4 = 6
    FP4 = 7
    LEVELS4 = 8
    LEVELS8 = 9
    INT6 = 10
    LEVELS6 = 11

    @property
    def bits(self) -> int:
        """Of a code."""
        if self in (Codes.INT6, Codes.LEVELS6):
            return 6
        return 8 if self in (Codes.INT8, Codes.FP8, Codes.LEVELS8) else 4

    @property
    def has_levels(self) -> bool:
        """Whether codes count up from a least number of their group."""
        return self in (Codes.LEVELS4, Codes.LEVELS6, Codes.LEVELS8)


class CodedMatrix(Matrix):
    """A weight [outputs, inputs] of codes: (number - zero) * scale, rounded once to float32.

    Of levels it is number * scale + least, and ``zeros`` are these least numbers.

    Raises:
        MemoryError: The allocation fails.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        outputs: int,
        inputs: int,
        codes: Codes,
        *,
        group: int,  # inputs that share a scale
        zeros: bool,
        paired: bool,
        order: torch.Tensor | None,  # [inputs] int64
        table: torch.Tensor | None,  # [16] float32
        row_bytes: int = 0,  # that rows are rounded to (``pack_codes``); 0: they are exact
        span: int = 0,  # groups that share a float16; 0: each has a float32
        factors: bool = False,  # and a factor on it
        parts: Parts | None = None,
    ) -> None:
        self.outputs, self.inputs, self.paired = outputs, inputs, paired
        self.codes, self.group, self.zeros = codes, group, zeros
        self.order, self.table = order, table
        self.row_bytes, self.span, self.factors = row_bytes, span, factors
        self._kernels, self._library, self._parts = kernels, kernels.library, parts
        places = None if order is None else order.int().contiguous()
        numbers = None if table is None else table.float().contiguous()
        handle = self._library.rayfin_codes_create(
            *(outputs, inputs, codes, paired, group, zeros, row_bytes),
            None if places is None else places.data_ptr(),
            None if numbers is None else numbers.data_ptr(),
            *(addresses(parts), span, factors),
        )
        if not handle:
            raise MemoryError(f"no memory for a weight of {outputs} x {inputs}")
        self.handle = handle
        weakref.finalize(self, self._library.rayfin_matrix_destroy, handle)

    @property
    def bytes(self) -> int:
        """Of codes, scales and zero points, without padding."""
        groups, codes = -(-self.inputs // self.group), self.inputs * self.codes.bits // 8
        if self.span:
            each = 2 * -(-groups // self.span) + (groups if self.factors else 0)
            return self.outputs * (codes + each * (2 if self.zeros else 1))
        scale = 1 if self.codes == Codes.FP4 else 4
        zero = (4 if self.codes.has_levels else 2) if self.zeros else 0
        return self.outputs * (codes + groups * (scale + zero))

    @property
    def rounds_rows(self) -> bool:
        """Whether a matmul rounds its rows."""
        return self.row_bytes > 0

    @property
    def _kind(self) -> tuple[int, int, bool]:
        return self.row_bytes, self.span, self.factors

    def like(self, other: "CodedMatrix") -> bool:
        """Whether both can lie in one matrix."""

        def equal(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
            return one is two or (one is not None and two is not None and torch.equal(one, two))

        mine, theirs = ((m.codes, m.group, m.inputs, *m._kind) for m in (self, other))
        return mine == theirs and equal(self.order, other.order) and equal(self.table, other.table)


def pack_codes(
    kernels: CpuKernels, weight: Grouped, *, round_rows: bool = False, paired: bool = False
) -> CodedMatrix | None:
    """Packs a weight as it is, or None if the kernels do not read such codes.

    With ``round_rows`` a matmul with integers rounds its rows to 8 bits, with a scale for up to 32
    inputs; floats and tables of other numbers are multiplied exactly. ``paired`` is for a gate
    above an up projection (``CpuKernels.pack``).
    """
    coded = _codes_of(weight)
    if coded is None:
        return None
    kind, codes, zero = coded
    rounded = _for_rounded_rows(kind, codes, zero, weight) if round_rows else None
    if rounded is not None:
        kind, codes = rounded
    shared = _shared(weight, zero)
    matrix = CodedMatrix(
        kernels,
        *weight.shape,
        kind,
        group=weight.group,
        zeros=zero is not None,
        paired=paired,
        order=weight.order,
        table=weight.table if kind == Codes.TABLE4 else None,
        row_bytes=int(rounded is not None),
        span=0 if shared is None else shared.span,
        factors=shared is not None and shared.factors is not None,
    )
    assert codes.is_contiguous() and codes.shape == weight.shape
    if shared is not None:
        _fill_shared(matrix, codes, shared)
        return matrix
    scale = weight.scale.float().contiguous()
    assert scale.shape == (matrix.outputs, -(-matrix.inputs // matrix.group))
    kernels.library.rayfin_codes_fill(
        matrix.handle,
        *(0, matrix.outputs, codes.data_ptr(), scale.data_ptr()),
        None if zero is None else zero.data_ptr(),
    )
    return matrix


def stack_codes(
    kernels: CpuKernels, matrices: list[CodedMatrix], *, paired: bool = False
) -> CodedMatrix:
    """One matrix of the outputs of several that are alike; ``paired`` as ``CpuKernels.pack``."""
    first = matrices[0]
    assert all(first.like(other) and not other.paired for other in matrices)
    stacked = CodedMatrix(
        kernels,
        sum(matrix.outputs for matrix in matrices),
        first.inputs,
        first.codes,
        group=first.group,
        zeros=any(matrix.zeros for matrix in matrices),
        paired=paired,
        order=first.order,
        table=first.table,
        row_bytes=first.row_bytes,
        span=first.span,
        factors=first.factors,
    )
    start = 0
    for matrix in matrices:
        _copy(stacked, start, matrix, 0, matrix.outputs)
        start += matrix.outputs
    return stacked


def cut_codes(kernels: CpuKernels, matrix: CodedMatrix, start: int, outputs: int) -> CodedMatrix:
    """A matrix of some outputs of a stacked one."""
    part = CodedMatrix(
        kernels,
        outputs,
        matrix.inputs,
        matrix.codes,
        group=matrix.group,
        zeros=matrix.zeros,
        paired=False,
        order=matrix.order,
        table=matrix.table,
        row_bytes=matrix.row_bytes,
        span=matrix.span,
        factors=matrix.factors,
    )
    _copy(part, 0, matrix, start, outputs)
    return part


def _copy(to: CodedMatrix, first: int, matrix: CodedMatrix, start: int, count: int) -> None:
    assert first + count <= to.outputs and start + count <= matrix.outputs
    to._library.rayfin_codes_copy(to.handle, first, matrix.handle, start, count)


def _codes_of(weight: Grouped) -> tuple[Codes, torch.Tensor, torch.Tensor | None] | None:
    """The kind of codes, the codes [N, K] uint8, and zero points [N, G] int16 unless all are 0.

    Of levels least numbers [N, G] float32.
    """
    values, group = weight.values, weight.group
    if values.device.type != "cpu" or not 1 <= group <= MAX_INPUTS:
        return None
    if weight.least is not None:
        if values.dtype != torch.uint8 or weight.zero is not None or weight.table is not None:
            return None
        kind = Codes.LEVELS4 if weight.bits <= 4 else Codes.LEVELS8
        return kind, values.contiguous(), weight.least.float().contiguous()
    if weight.table is not None:
        simple = weight.bits == 4 and weight.zero is None and len(weight.table) == 16
        kind = Codes.FP4 if weight.shared is None and _is_fp4(weight) else Codes.TABLE4
        return (kind, values.contiguous(), None) if simple else None
    if values.dtype == torch.float8_e4m3fn:
        octets = values.contiguous().view(torch.uint8)
        nan = bool(((octets & 0x7F) == 0x7F).any())
        # A scale is multiplied by 2^120 (codes.h).
        if weight.zero is not None or nan or bool((weight.scale.abs() >= 128).any()):
            return None
        return Codes.FP8, octets, None
    if values.dtype == torch.int8:
        return Codes.INT8, values.contiguous().view(torch.uint8), _zeros(weight, 0)
    if values.dtype != torch.uint8 or weight.bits > 8:
        return None
    if weight.bits <= 4:
        return Codes.INT4, values.contiguous(), _zeros(weight, 8)
    return Codes.INT8, (values ^ 0x80).contiguous(), _zeros(weight, 128)


def _for_rounded_rows(
    kind: Codes, codes: torch.Tensor, zero: torch.Tensor | None, weight: Grouped
) -> tuple[Codes, torch.Tensor] | None:
    """The kind and codes for products with rounded rows, or None if there are none.

    Integers that fit into 6 bits are stored so: fewer bytes are read.
    """
    if kind in (Codes.INT4, Codes.LEVELS4):
        return kind, codes
    if kind == Codes.TABLE4:
        assert weight.table is not None
        octets = weight.table.clamp(-128, 127).round()
        return (kind, codes) if torch.equal(octets, weight.table) else None
    if kind == Codes.LEVELS8:
        return (Codes.LEVELS6, codes) if int(codes.max()) < 64 else None
    if kind != Codes.INT8:
        return None
    raised = codes + 32  # modulo 256: of -32 .. 31 at most 63
    return (kind, codes) if zero is not None or int(raised.max()) > 63 else (Codes.INT6, raised)


def _shared(weight: Grouped, zero: torch.Tensor | None) -> SharedScales | None:
    """Its scales in fewer bytes, if the kernels read them."""
    shared = weight.shared
    if shared is None or (zero is not None and shared.least is None):
        return None
    finite = shared.scale.isfinite().all() and (
        shared.least is None or shared.least.isfinite().all()
    )
    return shared if finite else None


def _fill_shared(
    matrix: CodedMatrix, codes: torch.Tensor, shared: SharedScales, first: int = 0
) -> None:
    groups = -(-matrix.inputs // matrix.group)
    parts = (shared.scale, shared.factors, shared.least, shared.least_factors)
    kept = [None if part is None else part.contiguous() for part in parts]
    assert (
        shared.scale.shape == (len(codes), -(-groups // shared.span))
        and shared.scale.dtype == torch.float16
    )
    matrix._library.rayfin_codes_fill_shared(
        *(matrix.handle, first, len(codes), codes.data_ptr()),
        *(None if part is None else part.data_ptr() for part in kept),
    )


def _is_fp4(weight: Grouped) -> bool:
    """Whether it is of e2m1 floats and powers of two.

    Such a scale is stored as its exponent, and multiplied by as little as 2^-25 (codes.h).
    """
    if weight.table is None or weight.table.tolist() != list(E2M1):
        return False
    bits = weight.scale.float().view(torch.int32)
    exponents = bits >> 23
    return bool(((bits & 0x7FFFFF == 0) & (exponents > 25) & (exponents < 253)).all())


def _zeros(weight: Grouped, middle: int) -> torch.Tensor | None:
    """Zero points less the number that the code 0 stands for."""
    zero = torch.zeros(weight.scale.shape) if weight.zero is None else weight.zero
    points = (zero.int() - middle).to(torch.int16).contiguous()
    return points if bool(points.any()) else None


ROUNDED_GROUP = 32
"""Inputs that share a scale in weights that are rounded here (round_weights.h)."""

SPAN = 8
"""Groups of such levels that share a 16-bit float."""

ROUNDED_AT_ONCE = 1 << 22
"""Weights that are rounded at once."""


def round_int8(kernels: CpuKernels, weight: torch.Tensor) -> Grouped:
    """Rounds a weight [N, K] to numbers from -127 to 127 with a 16-bit scale for each group."""
    weight = weight.detach().float().contiguous()
    codes = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight), -(-weight.shape[1] // ROUNDED_GROUP), dtype=torch.float16)
    place = (weight.data_ptr(), *weight.shape, codes.data_ptr(), scale.data_ptr())
    kernels.library.rayfin_round_int8(kernels.pool, *place)
    return Grouped(codes, scale.float(), ROUNDED_GROUP, 8, shared=SharedScales(1, scale))


def round_levels(kernels: CpuKernels, weight: torch.Tensor, bits: int = 4) -> Grouped:
    """Rounds a weight [N, K] to levels above a least number of each group (round_weights.h)."""
    weight = weight.detach().float().contiguous()
    outputs, inputs = weight.shape
    groups = -(-inputs // ROUNDED_GROUP)
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scale, least = (torch.empty(outputs, -(-groups // SPAN), dtype=torch.float16) for _ in "12")
    factors, least_factors = (torch.empty(outputs, groups, dtype=torch.int8) for _ in "12")
    parts = (codes, scale, factors, least, least_factors)
    kernels.library.rayfin_round_levels(
        kernels.pool,
        *(weight.data_ptr(), outputs, inputs, 2**bits - 1, SPAN),
        *(part.data_ptr() for part in parts),
    )
    shared = SharedScales(SPAN, scale, factors, least, least_factors)
    return Grouped(
        *(codes, shared.scales(), ROUNDED_GROUP, bits), least=shared.leasts(), shared=shared
    )


def pack_int8(
    kernels: CpuKernels, weights: list[torch.Tensor], *, paired: bool = False, row_bytes: int = 1
) -> CodedMatrix:
    """``CpuKernels.pack`` of weights rounded to 8 bits; the matmul rounds its rows as well."""
    rounded = partial(round_int8, kernels)
    return _pack_rounded(kernels, weights, paired, Codes.INT8, rounded, row_bytes)


def pack_int4(
    kernels: CpuKernels, weights: list[torch.Tensor], *, paired: bool = False
) -> CodedMatrix:
    """``CpuKernels.pack`` of weights rounded to 4 bits; the matmul rounds its rows to 8 bits."""
    return _pack_rounded(kernels, weights, paired, Codes.LEVELS4, partial(round_levels, kernels))


def pack_int6(
    kernels: CpuKernels, weights: list[torch.Tensor], *, paired: bool = False
) -> CodedMatrix:
    """``CpuKernels.pack`` of weights rounded to 6 bits; the matmul rounds its rows to 8 bits."""
    rounded = partial(round_levels, kernels, bits=6)
    return _pack_rounded(kernels, weights, paired, Codes.LEVELS6, rounded)


def _pack_rounded(
    kernels: CpuKernels,
    weights: list[torch.Tensor],
    paired: bool,
    kind: Codes,
    rounded: Callable[[torch.Tensor], Grouped],
    row_bytes: int = 1,
) -> CodedMatrix:
    outputs, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
    matrix = CodedMatrix(
        kernels,
        *(outputs, inputs, kind),
        group=ROUNDED_GROUP,
        zeros=kind.has_levels,
        paired=paired,
        order=None,
        table=None,
        row_bytes=row_bytes,
        span=SPAN if kind.has_levels else 1,
        factors=kind.has_levels,
    )
    first, step = 0, max(1, ROUNDED_AT_ONCE // inputs)
    for weight in weights:
        for start in range(0, len(weight), step):
            some = rounded(weight[start : start + step])
            assert some.shared is not None
            _fill_shared(matrix, some.values, some.shared, first)
            first += len(some.values)
    return matrix
