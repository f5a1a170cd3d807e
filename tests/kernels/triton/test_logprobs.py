"""Log probabilities without a sort, against the reference's by one."""

import pytest
import torch

from rayfin.kernels import reference

pytest.importorskip("triton")
from rayfin.kernels.triton import logprobs as module

V = 300


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 128)
    monkeypatch.setattr(module, "MAX_TOP_LOGPROBS", 8)


def run(
    logits: torch.Tensor, tokens: list[int], asked: list[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(tokens), 1 + module.MAX_TOP_LOGPROBS)
    values = torch.full(shape, 77.0, device=device)
    numbers = torch.full(shape, 77, dtype=torch.int32, device=device)
    wanted = torch.tensor(asked, dtype=torch.int32, device=device)
    ids = torch.tensor(tokens, device=device)
    module.top_logprobs(logits.to(device), ids, wanted, values, numbers)
    return values.cpu(), numbers.cpu()


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocabulary", [300, 5, 128])
def test_against_a_sort(
    device: torch.device, vocabulary: int, dtype: torch.dtype, ties: bool
) -> None:
    """Rows that ask for none, some, all that there is room for, or more than there are."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(4, vocabulary, generator=generator)
    logits = logits.round() if ties else logits
    wide = torch.zeros(4, vocabulary + 7, dtype=dtype)
    wide[:, :vocabulary] = logits
    logits = wide[:, :vocabulary]
    logits[3, 1] = float("-inf")
    asked, tokens = [-1, 0, 3, 8], [2, 1, int(logits[2].argmax()), 4]
    values, numbers = run(logits, tokens, asked, device)
    assert (values[0] == 77).all() and (numbers[0] == 77).all()
    for row in range(1, 4):
        k = min(asked[row], vocabulary)
        own, rank, ids, top = reference.logprobs(logits[row], tokens[row], k)
        wanted = torch.tensor([own, *top])
        torch.testing.assert_close(values[row, : k + 1], wanted, rtol=1e-5, atol=1e-5)
        assert numbers[row, : k + 1].tolist() == [rank, *ids]
        assert (numbers[row, 1 + asked[row] :] == 77).all()


def test_nothing_to_do(device: torch.device) -> None:
    run(torch.zeros(0, V), [], [], device)
    values, _ = run(torch.zeros(1, V), [-1], [2], device)  # a row that could not be sampled
    assert values[0, 1:3].isfinite().all()
