"""Penalties against a loop."""

import torch

from rayfin.kernels.sampling.penalties import apply_penalties


def test_against_a_loop() -> None:
    torch.manual_seed(0)
    rows, vocabulary = 4, 12
    logits = torch.randn(rows, vocabulary)
    before = logits.clone()
    in_prompt = torch.rand(rows, vocabulary) > 0.5
    counts = torch.randint(0, 3, (rows, vocabulary))
    repetition = torch.tensor([1.0, 1.3, 0.8, 2.0])
    presence = torch.tensor([0.0, 0.5, -0.5, 1.0])
    frequency = torch.tensor([0.0, 0.2, -0.1, 0.7])
    out = apply_penalties(
        logits, in_prompt, counts, repetition=repetition, presence=presence, frequency=frequency
    )
    for r in range(rows):
        for t in range(vocabulary):
            x, n = float(before[r, t]), int(counts[r, t])
            if in_prompt[r, t] or n:
                x = x / float(repetition[r]) if x > 0 else x * float(repetition[r])
            x -= float(frequency[r]) * n + float(presence[r]) * (n > 0)
            assert abs(float(out[r, t]) - x) < 1e-5
    assert torch.equal(out[0], before[0])  # everything off
    assert torch.equal(logits, before)  # the input is not touched
    assert not torch.allclose(out[1], before[1])
