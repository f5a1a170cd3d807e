"""Products with weights of 4 and 8 bits, against the same weights made whole (`Grouped.dense`)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.kernels.grouped import Grouped

pytest.importorskip("triton")
from rayfin.kernels.triton import quantized
from rayfin.kernels.triton.quantized import (
    FEW,
    MANY,
    PRECISE,
    SOME,
    TIGHT,
    CodedWeight,
    add_product,
    pack_weight,
    parts_of,
    product,
    shape_for,
    stack_weights,
)

Close = Callable[[torch.Tensor, torch.Tensor], None]
DTYPES = [torch.float32, torch.float16]
KINDS = ["4 bits", "8 bits", "int8", "e4m3", "table"]


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
    groups, bits = -(-inputs // group), 4 if kind in ("4 bits", "table") else 8
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
    return Grouped(values, scale, group, bits, zero, table, places)


def on(device: torch.device, weight: Grouped) -> Grouped:
    def moved(tensor: torch.Tensor | None) -> Any:
        return None if tensor is None else tensor.to(device)

    names = ("values", "scale", "zero", "table", "order")
    return replace(weight, **{name: moved(getattr(weight, name)) for name in names})


def packed(weight: Grouped, device: torch.device) -> CodedWeight:
    found = pack_weight(on(device, weight))
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
        coded = packed(weight, device)
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
    coded, x = packed(weight, device), rows_of(3, 256, dtype) / 16
    assert coded.kind == quantized.E4M3
    expected = wanted(x, weight)
    assert expected.abs().mean() > 0.1
    close(product(x.to(device), coded, None), expected)


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 40, 64, 65, 70])
def test_rows(device: torch.device, close: Close, rows: int) -> None:
    """In the tile for so many rows, and as a program for each."""
    weight = drawn("4 bits", 48, 160, 32)
    x, coded = rows_of(rows, 160, torch.float16), packed(weight, device)
    close(product(x.to(device), coded, None), wanted(x, weight))


@pytest.mark.parametrize("shape", [FEW, SOME, TIGHT, MANY, PRECISE])
@pytest.mark.parametrize("kind", ["4 bits", "e4m3"])
def test_shapes_of_tiles(device: torch.device, close: Close, shape: Any, kind: str) -> None:
    weight = drawn(kind, 150, 256, 128)
    x, coded = rows_of(70, 256, torch.float16), packed(weight, device)
    close(product(x.to(device), coded, None, shape=shape), wanted(x, weight))


@pytest.mark.parametrize("split", [2, 3, 5])
def test_parts_of_the_inputs(device: torch.device, close: Close, split: int) -> None:
    """Programs that share an output; twice, since counters have to be zero again; same bits."""
    weight = drawn("4 bits", 80, 600, 32)
    x, coded = rows_of(5, 600, torch.float16).to(device), packed(weight, device)
    hidden = rows_of(5, 80, torch.float16, seed=4)
    first = product(x, coded, None, split=split)
    close(first, wanted(x.cpu(), weight))
    assert torch.equal(product(x, coded, None, split=split), first)
    stream = hidden.clone().to(device)
    add_product(x, coded, None, stream, residual_scale=0.5, split=split)
    close(stream, hidden.float() + 0.5 * wanted(x.cpu(), weight))
    assert not coded.arrived.any()


def test_added_to_the_stream(device: torch.device, close: Close) -> None:
    for dtype in DTYPES:
        weight = drawn("int8", 70, 96, 96)
        x, hidden = rows_of(3, 96, dtype), rows_of(3, 70, dtype, seed=4)
        bias, stream = rows_of(1, 70, dtype, seed=5)[0], hidden.clone().to(device)
        coded = packed(weight, device)
        add_product(x.to(device), coded, bias.to(device), stream, residual_scale=0.7)
        close(stream, hidden.float() + 0.7 * wanted(x, weight, bias))


def test_an_order_of_inputs(device: torch.device, close: Close) -> None:
    weight = drawn("4 bits", 40, 96, 32, order=True)
    x = rows_of(3, 96, torch.float16)
    close(product(x.to(device), packed(weight, device), None), wanted(x, weight))


def test_a_row_that_is_not_finite_spoils_no_other(device: torch.device) -> None:
    weight = packed(drawn("4 bits", 40, 100, 32), device)
    x = rows_of(5, 100, torch.float16).to(device)
    alone = product(x, weight, None)
    x[1], x[3, 99] = float("nan"), float("inf")
    beside = product(x, weight, None)
    assert torch.equal(beside[[0, 2, 4]], alone[[0, 2, 4]])
    assert beside[1].isnan().all() and not beside[3].isfinite().any()


@pytest.mark.parametrize("form", list(quantized.FORMS))
@pytest.mark.parametrize("zeros", ["any", "none"])
def test_weights_of_several_layers(
    device: torch.device, close: Close, form: int, zeros: str
) -> None:
    """In one weight, and as parts of it; scales of other types, zero points of one only."""
    kinds = ("none", zeros)
    weights = [drawn("4 bits", 40 + 9 * i, 96, 32, zeros=z, seed=i) for i, z in enumerate(kinds)]
    large = 2.0**30 if form == quantized.BRAIN else 1.0  # out of fp16's range
    scale = weights[1].scale * 1.001  # not in 16 bits
    if form != quantized.WIDE:
        scale = scale.to(quantized.FORMS[form]).float()
    weights[1] = replace(weights[1], scale=scale * large)
    coded = [packed(weight, device) for weight in weights]
    assert [one.form for one in coded] == [quantized.HALF, form]
    whole, x = stack_weights(coded), rows_of(3, 96, torch.float32)
    assert whole is not None and whole.outputs == 89
    first, second = (wanted(x, weight) for weight in weights)
    together = product(x.to(device), whole, None)
    close(together[:, :40], first)
    close(together[:, 40:] / large, second / large)
    close(product(x.to(device), whole.part(40, 49), None) / large, second / large)
    assert whole.part(40, 49).words.data_ptr() != whole.words.data_ptr()


def test_weights_that_are_not_alike(device: torch.device) -> None:
    first = packed(drawn("4 bits", 8, 96, 32), device)
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


def test_programs_fill_the_device() -> None:
    assert [shape_for(rows, torch.float16) for rows in (1, 16, 17, 64, 65)] == [
        *(FEW, FEW, SOME, SOME, MANY)
    ]
    small = [shape_for(rows, torch.float16, 99 << 10) for rows in (1, 16, 17, 65)]
    assert small == [FEW, FEW, TIGHT, TIGHT]
    assert shape_for(1, torch.float32) is PRECISE
    assert parts_of(tiles=64, blocks=32, cores=132) == 6
    assert parts_of(tiles=448, blocks=32, cores=132) == 1
    assert parts_of(tiles=1, blocks=112, cores=132) <= quantized.MOST_PARTS
    assert parts_of(tiles=1, blocks=1, cores=132) == 1
