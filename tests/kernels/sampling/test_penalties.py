"""Penalties and masks against loops."""

import torch

from rayfin.kernels.reference import penalised
from rayfin.kernels.sampling.filters import (
    UsedTokens,
    add_bias,
    allow_only,
    apply_penalties,
    forbid,
)

ROWS, VOCABULARY = 4, 12


def test_penalties_against_a_loop() -> None:
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCABULARY)
    before = logits.clone()
    prompts = [[], [1, 2, 2], [5, 6, 7], [0, 11]]
    outputs = [[3, 3, 4], [2, 2, 9], [], [11, 11, 11, 4]]
    repetition, presence, frequency = [1.0, 1.3, 0.8, 2.0], [0.0, 0.5, -0.5, 1.0], [0, 0.2, 1, 0.7]
    pairs = [(r, t) for r in range(ROWS) for t in sorted({*prompts[r], *outputs[r]})]
    row, token = torch.tensor(pairs).T
    apply_penalties(
        logits,
        UsedTokens(
            row=row,
            token=token,
            count=torch.tensor([outputs[r].count(t) for r, t in pairs]),
            repetition=torch.tensor(repetition)[row],
            presence=torch.tensor(presence)[row],
            frequency=torch.tensor(frequency)[row],
        ),
    )
    for r in range(ROWS):
        expected = penalised(
            before[r],
            prompts[r],
            outputs[r],
            repetition=repetition[r],
            presence=presence[r],
            frequency=frequency[r],
        )
        torch.testing.assert_close(logits[r], expected)
    assert torch.equal(logits[0], before[0])  # everything off
    assert not torch.allclose(logits[1], before[1])


def test_masks() -> None:
    before = torch.arange(24.0).view(2, 12)
    never = float("-inf")
    logits = before.clone()
    forbid(logits, torch.tensor([0, 0, 1]), torch.tensor([3, 3, 4]))
    assert logits[0, 3] == logits[1, 4] == never
    assert (logits == never).sum() == 2
    logits = before.clone()
    allow_only(logits, torch.tensor([1]), torch.tensor([1, 1, 1]), torch.tensor([2, 5, 2]))
    assert torch.equal(logits[0], before[0])
    kept = [token for token in range(12) if logits[1, token] != never]
    assert kept == [2, 5] and torch.equal(logits[1, kept], before[1, kept])
    logits = before.clone()
    forbid(logits, torch.tensor([0]), torch.tensor([1]))
    add_bias(logits, torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([7.0, 0.5]))
    assert logits[0, 1] == never and logits[0, 2] == 2.5
    assert torch.equal(logits[1], before[1])
