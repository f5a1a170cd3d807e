"""A mixture of experts by grouped products against the reference, a row and an expert at a time."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rayfin.kernels import reference
from rayfin.kernels.cpu.experts import ClampedSwish, ExpertBiases
from rayfin.kernels.grouped import E2M1, Grouped

pytest.importorskip("triton")
from rayfin.kernels.triton import experts as module
from rayfin.kernels.triton.experts import (
    CODED_FEW,
    CODED_MANY,
    Experts,
    ExpertTileShape,
    MapSizes,
    map_assignments,
    max_tiles_for,
    run_experts,
)
from rayfin.kernels.triton.quantized import EXPONENT, CodedWeight, pack_weight, stack_weights

Close = Callable[[torch.Tensor, torch.Tensor], None]
Run = Callable[..., torch.Tensor]
SMALL = ExpertTileShape(rows=16, columns=16, depth=16, warps=1, stages=1)
SIZES = MapSizes(most_read=40, small_share=8, share=16, block=16, sorted=8, at_once=4)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny shapes then take several tiles of each kind, and the interpreter little time."""
    monkeypatch.setattr(module, "shape_for", lambda *_, coded: SMALL)
    monkeypatch.setattr(module, "MAP_SIZES", SIZES)
    monkeypatch.setattr(module, "SUM_BLOCK", 16)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (values / shape[-1] ** 0.5).to(dtype)


def routing(rows: int, count: int, top_k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts for each row, the last of them sometimes one that does not exist."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, count + 1, generator=generator).argsort(dim=1)[:, :top_k]
    return chosen.contiguous(), torch.rand(rows, top_k, generator=generator)


@pytest.fixture(scope="session")
def run(device: torch.device) -> Run:
    def on_device(*tensors: torch.Tensor, activation: str = "silu") -> torch.Tensor:
        x, gate_up, down, chosen, weights = (tensor.to(device) for tensor in tensors)
        experts = Experts(gate_up.unflatten(1, (2, -1)), down, activation)
        return run_experts(x, experts, chosen, weights).cpu()

    return on_device


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "hidden", "inner"),
    [
        (1, 1, 1, 8, 5),
        (3, 8, 2, 24, 20),  # more experts than assignments
        (5, 4, 4, 17, 33),
        (23, 2, 2, 32, 16),  # several tiles of each
        (40, 5, 3, 20, 18),
    ],
)
def test_any_shape(
    run: Run,
    close: Close,
    dtype: torch.dtype,
    rows: int,
    count: int,
    top_k: int,
    hidden: int,
    inner: int,
) -> None:
    gate_up, down = normal(count, 2 * inner, hidden, dtype=dtype), normal(count, hidden, inner)
    x = normal(rows, hidden, seed=1) * hidden**0.5
    chosen, weights = routing(rows, count, top_k, seed=2)
    expected = reference.experts(x, gate_up.float(), down, chosen, weights)
    close(run(x.to(dtype), gate_up, down.to(dtype), chosen, weights), expected)


def test_one_expert_takes_all_rows_or_none(run: Run, close: Close) -> None:
    gate_up, down, x = normal(4, 20, 16), normal(4, 16, 10), normal(19, 16, seed=1)
    for expert in (0, 3, 4, -1):  # the last two do not exist
        chosen, weights = torch.full((19, 1), expert), torch.ones(19, 1)
        expected = reference.experts(x, gate_up, down, chosen, weights)
        close(run(x, gate_up, down, chosen, weights), expected)
    assert run(x[:0], gate_up, down, chosen[:0], weights[:0]).shape == (0, 16)


def test_a_row_is_the_same_in_any_company(run: Run) -> None:
    gate_up, down, x = normal(3, 20, 16), normal(3, 16, 10), normal(24, 16, seed=1)
    chosen, weights = routing(24, 3, 2, seed=2)
    every = run(x, gate_up, down, chosen, weights)
    assert torch.equal(run(x[:5], gate_up, down, chosen[:5], weights[:5]), every[:5])


def test_rows_that_are_padding_choose_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are the same to the bit, and no tile is of an expert that padding alone chose."""
    gate_up, down, x = normal(3, 20, 16), normal(3, 16, 10), normal(9, 16, seed=1)
    x[2::3] = float("nan")
    experts = Experts(gate_up.unflatten(1, (2, -1)).to(device), down.to(device), "silu")
    chosen, slots = torch.tensor([[0], [1], [2]] * 3), torch.tensor([7, 0, -1] * 3)
    routed = (chosen.to(device), torch.ones(9, 1, device=device))
    tiles: list[torch.Tensor] = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *shape, **kind: tiles.append(empty(*shape, **kind)) or tiles[-1]
    )
    given = run_experts(x.to(device), experts, *routed, slots.to(device)).cpu()
    wanted = run_experts(x.to(device), experts, *routed).cpu()
    assert torch.equal(given[slots >= 0], wanted[slots >= 0]) and wanted.isnan().any()
    assert not given[slots < 0].any()
    first = next(each for each in tiles if each.dim() == 2)
    assert set(first[:, 0].tolist()) == {0, 1, -1}


def test_other_activations(run: Run, close: Close) -> None:
    gate_up, down, x = normal(1, 20, 16), normal(1, 16, 10), normal(3, 16, seed=1)
    chosen, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    inner = reference.gelu_mul(x @ gate_up[0].T)
    close(run(x, gate_up, down, chosen, weights, activation="gelu_tanh"), inner @ down[0].T)


@pytest.mark.parametrize("counts", [[1], [16, 17, 1], [0, 0, 33], [15, 1, 1, 1], [1] * 7])
def test_no_choice_takes_more_tiles(counts: list[int]) -> None:
    needed = sum(-(-count // 16) for count in counts)
    assert needed <= max_tiles_for(sum(counts), len(counts), 16)


def mapped(
    chosen: torch.Tensor, slots: torch.Tensor | None, experts: int, rows: int
) -> tuple[list[int], list[list[int]]]:
    """The order of assignments, and the tiles, in plain words."""
    used = torch.ones(len(chosen), dtype=torch.bool) if slots is None else slots >= 0
    order, tiles = list[int](), list[list[int]]()
    for expert in range(experts):
        own = ((chosen == expert) & used[:, None]).flatten().nonzero().flatten().tolist()
        for start in range(0, len(own), rows):
            tiles.append([expert, len(order) + start, min(len(own) - start, rows)])
        order += own
    return order, tiles


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("rows", "experts", "top_k"),
    [
        *((1, 1, 1), (1, 9, 2), (20, 4, 2)),  # all are read by each program
        *((21, 4, 2), (90, 7, 3), (64, 2, 1), (150, 31, 4)),  # counted before
    ],
)
def test_map(device: torch.device, rows: int, experts: int, top_k: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.randint(-1, experts + 1, (rows, top_k), generator=generator)
    slots = torch.randint(-1, 2, (rows,), generator=generator) if masked else None
    order, tiles = mapped(chosen, slots, experts, 16)
    given, given_tiles = map_assignments(
        chosen.to(device), None if slots is None else slots.to(device), experts, 16
    )
    assert given[: len(order)].tolist() == order
    assert given_tiles[: len(tiles)].tolist() == tiles
    assert (given_tiles[len(tiles) :, 0] == -1).all()


CLAMPED = ClampedSwish(1.7, 0.6)


def clamped(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2)
    low, within = gate.clamp(max=CLAMPED.limit), up.clamp(-CLAMPED.limit, CLAMPED.limit)
    return (1 + within) * low * torch.sigmoid(CLAMPED.slope * low)


def test_gate_and_up_in_turn_with_biases_and_a_clamp(device: torch.device, close: Close) -> None:
    """Weights as gpt-oss has them are read in their own strides."""
    gate_up, down, x = normal(3, 40, 24), normal(3, 24, 20), 3 * normal(19, 24, seed=1)
    biases = ExpertBiases(normal(3, 40, seed=4), normal(3, 24, seed=5))
    chosen, weights = routing(19, 3, 2, seed=2)
    expected = reference.experts(
        *(x, gate_up, down, chosen, weights),
        gated=clamped,
        gate_up_bias=biases.gate_up,
        down_bias=biases.down,
    )
    in_turn = torch.stack([gate_up[:, :20], gate_up[:, 20:]], dim=2).flatten(1, 2).mT.contiguous()
    turned, own = (
        in_turn.to(device),
        ExpertBiases(biases.gate_up.to(device), biases.down.to(device)),
    )
    experts = Experts(
        turned.unflatten(2, (-1, 2)).permute(0, 3, 2, 1),
        down.mT.contiguous().to(device).mT,
        CLAMPED,
        own,
    )
    close(run_experts(x.to(device), experts, chosen.to(device), weights.to(device)), expected)


def drawn(kind: str, outputs: int, inputs: int, group: int, seed: int) -> Grouped:
    """A weight of about unit outputs."""
    random = torch.Generator().manual_seed(seed)
    groups = -(-inputs // group)
    scale = (0.5 + torch.rand(outputs, groups, generator=random)) / inputs**0.5
    if kind == "e4m3":
        numbers = torch.randn(outputs, inputs, generator=random) * 60
        return Grouped(numbers.to(torch.float8_e4m3fn), scale / 60, group, 8)
    bits = 8 if kind == "8 bits" else 4
    values = torch.randint(0, 2**bits, (outputs, inputs), generator=random).to(torch.uint8)
    if kind == "e2m1":
        scale = 2.0 ** torch.randint(-6, -3, (outputs, groups), generator=random)
        return Grouped(values, scale, group, 4, table=torch.tensor(E2M1))
    zero = torch.randint(1, 2**bits, scale.shape, generator=random).int()
    return Grouped(values, (scale / 2 ** (bits - 2)).half().float(), group, bits, zero)


def packed(weights: list[Grouped], device: torch.device) -> CodedWeight:
    codes = [pack_weight(weight, torch.float16) for weight in weights]
    whole = stack_weights([one for one in codes if one is not None])
    assert whole is not None and len(codes) == len(weights) and whole.parted
    moved = {name: getattr(whole, name).to(device) for name in ("words", "groups", "arrived")}
    zeros = None if whole.zeros is None else whole.zeros.to(device)
    return replace(whole, **moved, zeros=zeros)


@pytest.mark.parametrize("shape", [CODED_FEW, CODED_MANY])
@pytest.mark.parametrize(
    ("kind", "group"),
    [
        *(("4 bits", 32), ("4 bits", 128), ("8 bits", 64), ("e4m3", 128), ("e2m1", 32)),
        *(("8 bits", 32), ("e2m1", 16)),  # blocks of half as many inputs
    ],
)
@pytest.mark.parametrize(("rows", "hidden", "inner"), [(3, 256, 96), (40, 160, 128)])
def test_codes(
    device: torch.device,
    close: Close,
    monkeypatch: pytest.MonkeyPatch,
    shape: ExpertTileShape,
    kind: str,
    group: int,
    rows: int,
    hidden: int,
    inner: int,
) -> None:
    """Those of plain weights of the same numbers; tiles and blocks that are not full."""
    monkeypatch.setattr(module, "shape_for", lambda *_, coded: shape)
    gate_up = [drawn(kind, inner, hidden, group, seed) for seed in range(6)]  # gate, up, gate ...
    down = [drawn(kind, hidden, inner, group, seed) for seed in range(6, 9)]
    x, (chosen, weights) = normal(rows, hidden, seed=1) * hidden**0.5, routing(rows, 3, 2, seed=2)
    x = x.half()
    biases = ExpertBiases(normal(3, 2 * inner, seed=4), normal(3, hidden, seed=5))
    plain = torch.stack([one.dense() for one in gate_up]).view(3, 2 * inner, hidden)
    first, last = packed(gate_up, device), packed(down, device)
    assert (first.form == EXPONENT) == (kind == "e2m1")
    routed = (chosen.to(device), weights.to(device).half())
    for act, gated, own in (("silu", reference.silu_mul, None), (CLAMPED, clamped, biases)):
        expected = reference.experts(
            *(x.float(), plain, torch.stack([one.dense() for one in down]), chosen),
            weights.half().float(),
            gated=gated,
            gate_up_bias=None if own is None else own.gate_up,
            down_bias=None if own is None else own.down,
        )
        moved = None if own is None else ExpertBiases(own.gate_up.to(device), own.down.to(device))
        given = run_experts(x.to(device), Experts(first, last, act, moved), *routed)
        torch.testing.assert_close(given.float().cpu(), expected, rtol=1e-2, atol=1e-2)


def test_codes_of_scales_in_several_forms(device: torch.device, close: Close) -> None:
    """Experts whose exponents, or whose scales in 16 bits, are not those of the others."""
    for kind, factor in (("e2m1", 1.5), ("4 bits", 1.001)):
        weights = [drawn(kind, 32, 128, 32, seed) for seed in range(8)]
        weights[5] = replace(weights[5], scale=weights[5].scale * factor)
        down = [drawn(kind, 128, 32, 32, seed) for seed in range(8, 12)]
        x, (chosen, shares) = normal(5, 128, seed=1).half() * 11, routing(5, 4, 2, seed=2)
        expected = reference.experts(
            x.float(),
            torch.stack([one.dense() for one in weights]).view(4, 64, 128),
            torch.stack([one.dense() for one in down]),
            *(chosen, shares),
        )
        experts = Experts(packed(weights, device), packed(down, device), "silu")
        given = run_experts(x.to(device), experts, chosen.to(device), shares.to(device))
        torch.testing.assert_close(given.float().cpu(), expected, rtol=1e-2, atol=1e-2)
