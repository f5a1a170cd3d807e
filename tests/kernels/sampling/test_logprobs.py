"""Log-probabilities against log_softmax and a sort."""

import pytest
import torch

from rayfin.kernels.sampling.sample import top_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 5, 40, 99])
def test_against_log_softmax(dtype: torch.dtype, k: int) -> None:
    torch.manual_seed(k)
    logits = (torch.randn(6, 40) * 3).to(dtype)
    tokens = torch.randint(0, 40, (6,), dtype=torch.int32)
    chosen, ids, values, rank = top_logprobs(logits, tokens, k)
    expected = torch.log_softmax(logits.double(), dim=-1)
    count = min(k, 40)
    order = torch.sort(logits.float(), dim=-1, descending=True, stable=True).indices[:, :count]
    assert ids.shape == values.shape == (6, count)
    assert torch.equal(ids, order)
    torch.testing.assert_close(values, expected.gather(1, order).float(), rtol=1e-5, atol=1e-5)
    for row, token in enumerate(tokens.tolist()):
        assert abs(float(chosen[row]) - float(expected[row, token])) < 1e-5
        assert int(rank[row]) == 1 + sum(v > logits[row, token] for v in logits[row])


def test_the_greedy_token_comes_first_among_equals() -> None:
    logits = torch.zeros(1, 20)
    logits[0, [4, 11]] = 1.0
    _, ids, _, rank = top_logprobs(logits, logits.argmax(-1), 2)
    assert ids.tolist() == [[4, 11]]
    assert rank.tolist() == [1]


def test_a_forbidden_token() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 2] = float("-inf")
    chosen, ids, values, rank = top_logprobs(logits, torch.tensor([2]), 4)
    assert chosen.item() == float("-inf")
    assert ids.tolist() == [[0, 1, 3, 2]]
    assert values[0, 3] == float("-inf")
    assert rank.item() == 4
