"""Products with weights of 4 and 8 bits, against the same weights made whole (`Grouped.dense`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.kernels.grouped import E2M1, Grouped

pytest.importorskip("triton")
from rayfin.kernels.triton import quantized
from rayfin.kernels.triton.quantized import (
    COLUMNS,
    EIGHT,
    FEW,
    PRECISE,
    SHORT,
    SOME,
    TIGHT,
    CodedWeight,
    add_product,
    pack_weight,
    parts_of,
    product,
    shape_for,
    stack_weights,
    widened,
)

Close = Callable[[torch.Tensor, torch.Tensor], None]
DTYPES = [torch.float32, torch.float16]
KINDS = ["4 bits", "8 bits", "int8", "e4m3", "e2m1", "table"]


def drawn(
    kind: str,
    outputs: int,
    inputs: int,
    group: int,
    *,
    zeros: str = "any",
    order: bool = False,
    seed: int = 0,
) -> Grouped:
    """A weight of about unit outputs. ``zeros``: "any", the ends "0" or "15", or "none"."""
    random = torch.Generator().manual_seed(seed)
    groups, bits = -(-inputs // group), 4 if kind in ("4 bits", "e2m1", "table") else 8
    scale = (0.5 + torch.rand(outputs, groups, generator=random)).half().float()
    scale = scale / (2.0 ** (bits - 2) * inputs**0.5)
    scale = scale.half().float()
    places = torch.randperm(inputs, generator=random) if order else None
    values = torch.randint(0, 2**bits, (outputs, inputs), generator=random).to(torch.uint8)
    zero = None
    if kind in ("4 bits", "8 bits"):
        shape, ends = (outputs, groups), {"0": 0, "15": 2**bits - 1, "none": 2 ** (bits - 1)}
        zero = torch.randint(0, 2**bits + 1, shape, generator=random).int()
        if zeros in ends:
            zero = torch.full(shape, ends[zeros], dtype=torch.int32)
    if kind == "int8":
        values = values.view(torch.int8)
    if kind == "e4m3":
        numbers = torch.randn(outputs, inputs, generator=random) * 60
        values = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
        values[0, :4] = torch.tensor([0.0, 2.0**-9, -3 * 2.0**-9, 448.0]).to(torch.float8_e4m3fn)
    table = torch.linspace(-8, 8, 16) ** 3 / 64 if kind == "table" else None
    if kind == "e2m1":
        scale, table = 2.0 ** scale.log2().round(), torch.tensor(E2M1)
    return Grouped(values, scale, group, bits, zero, table, places)


def on(device: torch.device, weight: Grouped) -> Grouped:
    def moved(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.to(device)

    names = ("values", "scale", "zero", "table", "order")
    return replace(weight, **{name: moved(getattr(weight, name)) for name in names})


def packed(
    weight: Grouped, device: torch.device, dtype: torch.dtype = torch.float32
) -> CodedWeight:
    """For rows of ``dtype``, which decides on the kernel."""
    found = pack_weight(on(device, weight), dtype)
    assert found is not None
    return found


def rows_of(rows: int, inputs: int, dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanted(x: torch.Tensor, weight: Grouped, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Each weight rounded once to the rows' dtype, sums in float32."""
    y = x.float() @ weight.dense().to(x.dtype).float().T
    return y if bias is None else y + bias.float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [16, 64, 96, 128, 1000])
def test_every_kind_of_code(
    device: torch.device, close: Close, dtype: torch.dtype, kind: str, group: int
) -> None:
    """Groups that end within the inputs, a scale per output, blocks that are not full."""
    for rows, inputs, outputs in ((1, 200, 40), (3, 256, 70)):
        weight = drawn(kind, outputs, inputs, group)
        x, bias = rows_of(rows, inputs, dtype), rows_of(1, outputs, dtype, seed=3)[0]
        coded = packed(weight, device, dtype)
        assert not coded.parted or (dtype, kind == "table") == (torch.float16, False)
        close(product(x.to(device), coded, bias.to(device)), wanted(x, weight, bias))
        close(product(x.to(device), coded, None), wanted(x, weight))


@pytest.mark.parametrize("kind", ["4 bits", "8 bits"])
@pytest.mark.parametrize("zeros", ["0", "15", "none"])
def test_zero_points(device: torch.device, close: Close, kind: str, zeros: str) -> None:
    weight = drawn(kind, 33, 96, 32, zeros=zeros)
    coded = packed(weight, device)
    assert coded.form == quantized.HALF and coded.zeros is None
    x = rows_of(2, 96, torch.float32)
    close(product(x.to(device), coded, None), wanted(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_least_numbers_of_e4m3(device: torch.device, close: Close, dtype: torch.dtype) -> None:
    """They are subnormal in fp32 too on their way, and vanish where a device flushes such to 0."""
    random = torch.Generator().manual_seed(2)
    octets = torch.randint(1, 8, (40, 256), generator=random).to(torch.uint8)
    octets |= torch.randint(0, 2, (40, 256), generator=random).to(torch.uint8) << 7
    values = octets.view(torch.float8_e4m3fn)
    assert 0 < values.float().abs().min() and values.float().abs().max() < 2.0**-6
    weight = Grouped(values, torch.linspace(90, 110, 80).view(40, 2), 128, 8)
    coded, x = packed(weight, device, dtype), rows_of(3, 256, dtype) / 16
    assert coded.kind == quantized.E4M3
    expected = wanted(x, weight)
    assert expected.abs().mean() > 0.1
    close(product(x.to(device), coded, None), expected)


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 65, 128, 129])
@pytest.mark.parametrize("kind", ["4 bits", "e4m3", "table"])
def test_rows(device: torch.device, close: Close, rows: int, kind: str) -> None:
    """In the tile for so many rows, and with the weight made whole."""
    weight = drawn(kind, 48, 160, 64)
    x, coded = rows_of(rows, 160, torch.float16), packed(weight, device, torch.float16)
    stream = rows_of(rows, 48, torch.float16, seed=4)
    bias, expected = rows_of(1, 48, torch.float16, seed=5)[0], stream.float()
    close(product(x.to(device), coded, bias.to(device)), wanted(x, weight, bias))
    for own in (None, bias):
        changed = stream.clone().to(device)
        place = None if own is None else own.to(device)
        add_product(x.to(device), coded, place, changed, residual_scale=0.5)
        close(changed, expected + 0.5 * wanted(x, weight, own))


@pytest.mark.parametrize("shape", [FEW, SOME, TIGHT, PRECISE])
@pytest.mark.parametrize("kind", ["4 bits", "e4m3"])
def test_shapes_of_tiles(device: torch.device, close: Close, shape: Any, kind: str) -> None:
    weight = drawn(kind, 150, 256, 128)
    x, coded = rows_of(70, 256, torch.float16), packed(weight, device)
    close(product(x.to(device), coded, None, shape=shape), wanted(x, weight))


@pytest.mark.parametrize("shape", [EIGHT, *(shape for pair in COLUMNS for shape in pair)])
@pytest.mark.parametrize(("kind", "group"), [("4 bits", 128), ("4 bits", 64), ("e4m3", 128)])
def test_shapes_of_tiles_with_weights_on_the_left(
    device: torch.device, close: Close, shape: Any, kind: str, group: int
) -> None:
    weight = drawn(kind, 150, 384, group)
    x, coded = rows_of(70, 384, torch.float16), packed(weight, device, torch.float16)
    close(product(x.to(device), coded, None, shape=shape), wanted(x, weight))


@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "e4m3", "e2m1"])
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
def test_every_code(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Products with the identity are the weights: on a GPU, of instructions for two at once."""
    weight = drawn(kind, 256, 256, 128)
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    if kind == "e4m3":
        codes[:, [0x7F, 0xFF]] = 0  # not a number
        weight = replace(weight, values=codes.view(torch.float8_e4m3fn))
    else:
        weight = replace(weight, values=codes & (2**weight.bits - 1))
    coded = packed(weight, device, dtype)
    each = torch.eye(256, dtype=dtype, device=device)
    given = torch.cat([product(part, coded, None) for part in each.split(64)])
    assert coded.parted and torch.equal(given.T, widened(coded, dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_weight(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Each number is that of the reference, also where the last block and group are not full."""
    for inputs, group in ((256, 128), (200, 64), (96, 16)):
        weight = drawn(kind, 30, inputs, group)
        whole = widened(packed(weight, device, dtype), dtype)
        assert torch.equal(whole.cpu(), weight.dense().to(dtype))


@pytest.mark.parametrize("split", [2, 3, 5])
@pytest.mark.parametrize("parted", [False, True])
def test_parts_of_the_inputs(device: torch.device, close: Close, split: int, parted: bool) -> None:
    """Programs that share an output; twice, since counters have to be zero again; same bits."""
    weight = drawn("4 bits", 80, 600, 32)
    x = rows_of(5, 600, torch.float16).to(device)
    coded = packed(weight, device, torch.float16 if parted else torch.float32)
    hidden = rows_of(5, 80, torch.float16, seed=4)
    assert coded.parted == parted
    first = product(x, coded, None, split=split)
    close(first, wanted(x.cpu(), weight))
    assert torch.equal(product(x, coded, None, split=split), first)
    stream = hidden.clone().to(device)
    add_product(x, coded, None, stream, residual_scale=0.5, split=split)
    close(stream, hidden.float() + 0.5 * wanted(x.cpu(), weight))
    assert not coded.arrived.any()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [8, 80])
def test_the_same_bits_each_time(device: torch.device, count: int) -> None:
    """Parts whose sum would be taken too early differ; counters are zero again."""
    coded = packed(drawn("4 bits", 512, 4096, 128), device, torch.float16)
    x = rows_of(count, 4096, torch.float16).to(device)
    for split in (4, None) if count <= 64 else (None,):
        first = product(x, coded, None, split=split)
        assert all(torch.equal(product(x, coded, None, split=split), first) for _ in range(500))
        assert not coded.arrived.any()


def test_added_to_the_stream(device: torch.device, close: Close) -> None:
    for dtype in DTYPES:
        weight = drawn("int8", 70, 96, 96)
        x, hidden = rows_of(3, 96, dtype), rows_of(3, 70, dtype, seed=4)
        bias, stream = rows_of(1, 70, dtype, seed=5)[0], hidden.clone().to(device)
        coded = packed(weight, device, dtype)
        add_product(x.to(device), coded, bias.to(device), stream, residual_scale=0.7)
        close(stream, hidden.float() + 0.7 * wanted(x, weight, bias))


def test_exponents_of_scales(device: torch.device, close: Close) -> None:
    """A byte each, down to 2^-127; scales that are no powers of two are fp32."""
    weight = drawn("e2m1", 40, 128, 32)
    coded, x = packed(weight, device, torch.float16), rows_of(3, 128, torch.float16)
    assert coded.form == quantized.EXPONENT and coded.groups.dtype == torch.uint8
    assert coded.kind == quantized.E2M1 and coded.table is None
    ends = torch.tensor([2.0**-127, 2.0**-126, 2.0**127, 2.0**-12]).expand(40, 4)
    least = packed(replace(weight, scale=ends), device, torch.float16)
    assert least.groups[:, 0].tolist() == [0, 1, 254, 115]
    assert torch.equal(widened(least, torch.float32).cpu(), replace(weight, scale=ends).dense())
    for scale in (weight.scale * 1.5, weight.scale * 0, weight.scale * -1):
        other = replace(weight, scale=scale)
        wide = packed(other, device, torch.float16)
        assert (wide.kind, wide.form) == (quantized.E2M1, quantized.WIDE)
        close(product(x.to(device), wide, None), wanted(x, other))
        both = stack_weights([coded, wide])
        assert both is not None and both.form == quantized.WIDE
        close(product(x.to(device), both, None)[:, :40], wanted(x, weight))


def test_a_scale_of_all(device: torch.device, close: Close) -> None:
    """NVFP4's lies in the table; layers of several ones are one weight."""
    weights = [drawn("e2m1", 40, 192, 16, seed=seed) for seed in (0, 1)]
    assert weights[0].table is not None
    tables = (weights[0].table * 0.37, weights[0].table / 2.9)
    weights = [replace(one, table=table) for one, table in zip(weights, tables, strict=True)]
    coded = [packed(weight, device, torch.float16) for weight in weights]
    assert [(one.kind, one.depth) for one in coded] == [(quantized.E2M1, quantized.SHALLOW)] * 2
    whole, x = stack_weights(coded), rows_of(3, 192, torch.float16)
    assert whole is not None
    close(product(x.to(device), whole, None), torch.cat([wanted(x, one) for one in weights], dim=1))
    torch.testing.assert_close(widened(coded[1], torch.float32).cpu(), weights[1].dense())


def test_an_order_of_inputs(device: torch.device, close: Close) -> None:
    weight = drawn("4 bits", 40, 96, 32, order=True)
    x = rows_of(3, 96, torch.float16)
    coded = packed(weight, device, torch.float16)
    close(product(x.to(device), coded, None), wanted(x, weight))


def test_a_row_that_is_not_finite_spoils_no_other(device: torch.device) -> None:
    weight = packed(drawn("4 bits", 40, 100, 32), device, torch.float16)
    x = rows_of(5, 100, torch.float16).to(device)
    alone = product(x, weight, None)
    x[1], x[3, 99] = float("nan"), float("inf")
    beside = product(x, weight, None)
    assert torch.equal(beside[[0, 2, 4]], alone[[0, 2, 4]])
    assert beside[1].isnan().all() and not beside[3].isfinite().any()


@pytest.mark.parametrize("form", list(quantized.FORMS))
@pytest.mark.parametrize("zeros", ["any", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_several_layers(
    device: torch.device, close: Close, form: int, zeros: str, dtype: torch.dtype
) -> None:
    """In one weight, and as parts of it; scales of other types, zero points of one only."""
    kinds = ("none", zeros)
    weights = [drawn("4 bits", 40 + 9 * i, 96, 32, zeros=z, seed=i) for i, z in enumerate(kinds)]
    if form == quantized.BRAIN and dtype == torch.float16:
        pytest.skip("no such weight has products in fp16's range")
    large = 2.0**30 if form == quantized.BRAIN else 1.0  # out of fp16's range
    scale = weights[1].scale * 1.001  # not in 16 bits
    if form != quantized.WIDE:
        scale = scale.to(quantized.FORMS[form]).float()
    weights[1] = replace(weights[1], scale=scale * large)
    coded = [packed(weight, device, dtype) for weight in weights]
    assert [one.form for one in coded] == [quantized.HALF, form]
    whole, x = stack_weights(coded), rows_of(3, 96, dtype)
    assert whole is not None and whole.outputs == 89
    first, second = (wanted(x, weight) for weight in weights)
    together = product(x.to(device), whole, None)
    close(together[:, :40], first)
    close(together[:, 40:] / large, second / large)
    close(product(x.to(device), whole.part(40, 49), None) / large, second / large)
    assert whole.part(40, 49).words.data_ptr() != whole.words.data_ptr()


def test_weights_that_are_not_alike(device: torch.device) -> None:
    first = packed(drawn("4 bits", 8, 96, 32), device)
    narrow = packed(drawn("4 bits", 8, 96, 32), device, torch.float16)
    assert stack_weights([first, narrow]) is None  # codes in another order
    for other in (
        drawn("4 bits", 8, 96, 64),
        drawn("int8", 8, 96, 32),
        drawn("4 bits", 8, 96, 32, order=True),
        drawn("table", 8, 96, 32),
    ):
        assert stack_weights([first, packed(other, device)]) is None


def test_codes_without_a_kernel(device: torch.device) -> None:
    """Groups that end within a word, numbers that are none, scales out of range."""
    assert pack_weight(on(device, drawn("4 bits", 8, 96, 12))) is None
    weight = drawn("e4m3", 8, 64, 64)
    assert pack_weight(on(device, replace(weight, scale=weight.scale * 1e6))) is None
    weight.values.view(torch.uint8)[2, 3] = 0x7F
    assert pack_weight(on(device, weight)) is None


def test_a_weight_stays_small(device: torch.device) -> None:
    weight = packed(drawn("4 bits", 256, 1024, 128, zeros="none"), device)
    assert weight.bytes <= 0.54 * 256 * 1024
    assert packed(drawn("e4m3", 256, 1024, 1024), device).bytes <= 1.02 * 256 * 1024


def test_programs_fill_the_device(device: torch.device) -> None:
    half = torch.float16
    table = packed(drawn("table", 8, 128, 128), device, half)
    assert [shape_for(rows, table, half) for rows in (1, 16, 17, 64)] == [FEW, FEW, SOME, SOME]
    assert [shape_for(rows, table, half, 99 << 10) for rows in (1, 16, 17)] == [FEW, FEW, TIGHT]
    assert shape_for(1, packed(drawn("4 bits", 8, 128, 128), device), torch.float32) is PRECISE
    for outputs, many in ((8, False), (SHORT + 1, True)):
        coded = packed(drawn("4 bits", outputs, 128, 128), device, half)
        shapes = [shape_for(rows, coded, half) for rows in (1, 16, 17, 64, 65, 128)]
        first, second, third, last = (pair[many] for pair in COLUMNS)
        assert shapes == [first, first, second, third, last, last]
        assert shape_for(17, coded, half, 99 << 10) == replace(COLUMNS[1][0], stages=3)
    assert parts_of(tiles=64, blocks=32, programs=396) == 6
    assert parts_of(tiles=448, blocks=32, programs=396) == 1
    assert parts_of(tiles=1, blocks=112, programs=396) <= quantized.MOST_PARTS
    assert parts_of(tiles=1, blocks=1, programs=396) == 1


def test_trials_change_tiles_and_parts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up of the 8B shape in two parts; few rows in a tile of 8."""
    coded, half = packed(drawn("4 bits", 8, 128, 128), device, torch.float16), torch.float16
    monkeypatch.setenv("RAYFIN_TRY", "eight_rows,more_parts")
    assert shape_for(8, coded, half) is EIGHT and shape_for(9, coded, half) is COLUMNS[0][0]
    assert parts_of(tiles=224, blocks=32, programs=396) == 2
    assert parts_of(tiles=1, blocks=1, programs=396) == 1
    monkeypatch.delenv("RAYFIN_TRY")
    assert shape_for(8, coded, half) is COLUMNS[0][0]
    assert parts_of(tiles=224, blocks=32, programs=396) == 1
    monkeypatch.setenv("RAYFIN_TRY", "no_such")
    with pytest.raises(ValueError, match="no_such"):
        shape_for(8, coded, half)
