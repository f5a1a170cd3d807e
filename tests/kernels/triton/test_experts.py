"""A mixture of experts by grouped products against the reference, a row and an expert at a time."""

from collections.abc import Callable

import pytest
import torch

from rayfin.kernels import reference

pytest.importorskip("triton")
from rayfin.kernels.triton import experts as module
from rayfin.kernels.triton.experts import ExpertTileShape, max_tiles_for, run_experts

Close = Callable[[torch.Tensor, torch.Tensor], None]
Run = Callable[..., torch.Tensor]
SMALL = ExpertTileShape(rows=16, columns=16, depth=16, warps=1, stages=1)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny shapes then take several tiles of each kind, and the interpreter little time."""
    monkeypatch.setattr(module, "shape_for", lambda *_: SMALL)
    monkeypatch.setattr(module, "MAP_BLOCK", 16)
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
        return run_experts(*(tensor.to(device) for tensor in tensors), activation).cpu()

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


def test_other_activations(run: Run, close: Close) -> None:
    gate_up, down, x = normal(1, 20, 16), normal(1, 16, 10), normal(3, 16, seed=1)
    chosen, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    inner = reference.gelu_mul(x @ gate_up[0].T)
    close(run(x, gate_up, down, chosen, weights, activation="gelu_tanh"), inner @ down[0].T)


@pytest.mark.parametrize("counts", [[1], [16, 17, 1], [0, 0, 33], [15, 1, 1, 1], [1] * 7])
def test_no_choice_takes_more_tiles(counts: list[int]) -> None:
    needed = sum(-(-count // 16) for count in counts)
    assert needed <= max_tiles_for(sum(counts), len(counts), 16)
