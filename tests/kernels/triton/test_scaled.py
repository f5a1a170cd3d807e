"""Products of rows and weights in fp8, against rows that are rounded without kernels."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from rayfin.kernels.grouped import Grouped

pytest.importorskip("triton")
from rayfin.kernels.triton.quantized import (
    SCALED_ROWS,
    CodedWeight,
    add_product,
    pack_weight,
    product,
    stack_weights,
    with_rounded_rows,
)
from rayfin.kernels.triton.scaled import DEPTH, round_rows, rounded_rows

FP8 = torch.float8_e4m3fn
HALF = torch.float16
ROWS = SCALED_ROWS + 2


def drawn(outputs: int, inputs: int, group: int, seed: int = 0) -> Grouped:
    """A weight with a scale for each output, or for each block of 128 outputs and a group."""
    random = torch.Generator().manual_seed(seed)
    values = (torch.randn(outputs, inputs, generator=random) * 60).clamp(-448, 448).to(FP8)
    groups, rows = -(-inputs // group), outputs if group >= inputs else -(-outputs // DEPTH)
    scale = (0.5 + torch.rand(rows, groups, generator=random)) / 60 / inputs**0.5
    if group < inputs:
        scale = scale.repeat_interleave(DEPTH, 0)[:outputs]
    return Grouped(values, scale.contiguous(), group, 8)


def packed(weight: Grouped, device: torch.device) -> CodedWeight:
    moved = replace(weight, values=weight.values.to(device), scale=weight.scale.to(device))
    found = pack_weight(moved, HALF)
    assert found is not None
    return with_rounded_rows(found)


def rows_of(rows: int, inputs: int) -> torch.Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(5)).to(HALF)
    x[2] *= 100
    x[3] = 0
    return x


def near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Each row as near as its own largest number in fp16 allows."""
    error = (actual.cpu().float() - expected.float()).abs().amax(dim=1)
    assert (error <= 3e-3 * expected.float().abs().amax(dim=1)).all()


@pytest.fixture
def blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """torch's product of blocks, which needs a GPU: its own check of shapes, then the definition.

    Returns:
        The shapes of products so far.
    """
    real, seen, kinds = F.scaled_mm, list[tuple[int, ...]](), F.ScalingType
    if device.type == "cuda":
        return seen

    def multiply(a: Any, b: Any, of_a: Any, kind_a: Any, of_b: Any, kind_b: Any, **settings: Any):  # type: ignore[no-untyped-def]
        if kind_a != kinds.BlockWise1x128:
            return real(a, b, of_a, kind_a, of_b, kind_b, **settings)
        with FakeTensorMode():
            a_, b_, of_a_, of_b_ = (
                torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda")
                for one in (a, b, of_a, of_b)
            )
            real(a_, b_, of_a_, kind_a, of_b_, kind_b, **settings)
        seen.append((*a.shape, b.shape[1]))
        wide_a = of_a.repeat_interleave(DEPTH, 1)
        wide_b = of_b[: a.shape[1] // DEPTH].repeat_interleave(DEPTH, 0)
        wide_b = wide_b.repeat_interleave(DEPTH, 1)[:, : b.shape[1]]
        return ((a.float() * wide_a) @ (b.float() * wide_b)).to(settings["output_dtype"])

    monkeypatch.setattr(F, "scaled_mm", multiply)
    return seen


def test_shapes_that_torch_refuses(blocks: list[tuple[int, ...]], device: torch.device) -> None:
    """So the check of this file's product can fail."""
    if device.type == "cuda":
        pytest.skip("the device checks")
    kinds = F.ScalingType
    a, b = torch.zeros(16, 256).to(FP8), torch.zeros(128, 256).to(FP8)
    of_a, settings = torch.ones(2, 16).T, {"output_dtype": HALF}
    of_blocks = (kinds.BlockWise1x128, kinds.BlockWise128x128)
    F.scaled_mm(a, b.T, of_a, of_blocks[0], torch.ones(1, 4).T, of_blocks[1], **settings)
    for rows, wrong in ((of_a.contiguous(), torch.ones(1, 4).T), (of_a, torch.ones(1, 2).T)):
        with pytest.raises(Exception, match="scale"):
            F.scaled_mm(a, b.T, rows, of_blocks[0], wrong, of_blocks[1], **settings)


@pytest.mark.parametrize("by_block", [False, True])
def test_rounded_rows(device: torch.device, by_block: bool) -> None:
    """To the bit, in the order of the weight's numbers; rows of zeros, and a last block cut."""
    x = rows_of(21, 200)
    codes, scales = round_rows(x.to(device), 256, by_block)
    assert codes.shape == (32, 256) and scales.shape == (32, 2 if by_block else 1)
    halves = codes.cpu().float().view(32, 2, 64, 2).transpose(2, 3).reshape(32, 256)
    wide = scales.cpu().repeat_interleave(128 if by_block else 256, 1)
    given = halves * wide
    torch.testing.assert_close(given[:21, :200], rounded_rows(x, by_block), rtol=1e-6, atol=0)
    assert not given[21:].any() and not given[:, 200:].any()
    error = (given[:21, :200] - x.float()).abs().max(dim=1).values
    assert (error <= x.float().abs().amax(dim=1) / 16).all() and error.max() > 0


@pytest.mark.parametrize("by_block", [False, True])
def test_a_row_that_is_not_finite_spoils_no_other(device: torch.device, by_block: bool) -> None:
    x = rows_of(5, 256).to(device)
    alone, _ = round_rows(x, 256, by_block)
    x[1, 7], x[2, 130] = float("nan"), float("inf")
    codes, scales = round_rows(x, 256, by_block)
    numbers = codes.float() * scales.repeat_interleave(128 if by_block else 256, 1)
    assert torch.equal(codes[[0, 3, 4]].float(), alone[[0, 3, 4]].float())
    assert numbers[1].isnan().any() and numbers[2].isnan().any()


@pytest.mark.parametrize(("inputs", "group"), [(200, 200), (640, 128), (200, 128), (128, 128)])
def test_products(
    device: torch.device,
    blocks: list[tuple[int, ...]],
    inputs: int,
    group: int,
) -> None:
    """Those of rounded rows from so many on, exact below; also added, and of merged weights."""
    outputs = 144 if group >= inputs else 256
    weight = drawn(outputs, inputs, group)
    coded, x = packed(weight, device), rows_of(ROWS, inputs)
    assert coded.scaled is not None and coded.scaled.by_block == (group < inputs)
    numbers = coded.scaled.numbers
    assert numbers.data_ptr() == coded.words.data_ptr()  # no second copy
    bias = rows_of(outputs, 8).T[0].contiguous()
    rounded = rounded_rows(x, coded.scaled.by_block)
    wanted = rounded @ weight.dense().T
    near(product(x.to(device), coded, None), wanted)
    near(product(x.to(device), coded, bias.to(device)), wanted + bias)
    stream = rows_of(ROWS, outputs)
    added = stream.clone().to(device)
    add_product(x.to(device), coded, bias.to(device), added, residual_scale=0.5)
    near(added, stream + 0.5 * (wanted + bias))
    few = x[: SCALED_ROWS - 1]
    near(product(few.to(device), coded, None), few.float() @ weight.dense().T)
    if device.type != "cuda":
        assert len(blocks) == 3 * coded.scaled.by_block


def test_merged_weights_and_parts(device: torch.device, blocks: list[tuple[int, ...]]) -> None:
    """Scales go with their outputs; of a block in part rows are exact."""
    weights = [drawn(128, 256, 128), drawn(256, 256, 128, seed=1)]
    x = rows_of(ROWS, 256)
    whole = stack_weights([packed(weight, device) for weight in weights])
    assert whole is not None and whole.scaled is not None
    wanted = [rounded_rows(x, True) @ weight.dense().T for weight in weights]
    near(product(x.to(device), whole, None), torch.cat(wanted, dim=1))
    part = whole.part(128, 256)
    assert part.scaled is not None
    near(product(x.to(device), part, None), wanted[1])
    cut = whole.part(0, 64)
    assert cut.scaled is None
    near(product(x.to(device), cut, None), x.float() @ weights[0].dense()[:64].T)


def test_weights_whose_rows_stay_exact(device: torch.device) -> None:
    """Other groups, outputs that are no whole blocks, other codes, and rows of 32 bits."""
    assert packed(drawn(128, 512, 256), device).scaled is None
    assert packed(drawn(144, 256, 128), device).scaled is None
    assert packed(drawn(130, 256, 256), device).scaled is None
    weight = drawn(128, 256, 128)
    each = replace(weight, scale=torch.rand(128, 2) + 0.5)
    assert packed(each, device).scaled is None
    integers = replace(weight, values=weight.values.view(torch.int8))
    assert packed(integers, device).scaled is None
    moved = replace(weight, values=weight.values.to(device), scale=weight.scale.to(device))
    wide = pack_weight(moved, torch.float32)
    assert wide is not None and with_rounded_rows(wide).scaled is None
