"""Tokens on their way from the device, with copies that are made as late as they may be."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rayfin.actors.messages import NO_TOKEN
from rayfin.actors.runner.gpu.graph_extras import OUTPUTS
from rayfin.actors.runner.gpu.graph_tokens import GraphTokens
from rayfin.actors.runner.request_slots import NO_LOGPROBS


class LateCopies:
    """A side stream that copies when somebody waits: each copy alone."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        return lambda: [target.copy_(source)] and None


@pytest.mark.parametrize("aside", [False, True])
def test_every_step_keeps_its_tokens(aside: bool) -> None:
    """Though all steps sample into one tensor, and copies are late; of two calls in turn."""
    side = LateCopies() if aside else None
    calls = [GraphTokens(3, 4, torch.device("cpu"), side) for _ in range(2)]  # type: ignore[arg-type]
    assert len(calls[0]) == 3
    sampled = torch.empty(4, dtype=torch.int64)
    for tokens, num_steps, bucket in zip(calls, (3, 2), (4, 2), strict=True):
        for step in range(num_steps):
            sampled.copy_(torch.arange(4) + 10 * step + 100 * num_steps)
            tokens.store(step, sampled[:bucket])
        tokens.send(num_steps)
    taken = [calls[0].collect(3, 3), calls[1].collect(2, 1)]
    assert [array.dtype for array in taken] == ["int32", "int32"]
    assert taken[0].tolist() == [[300, 301, 302], [310, 311, 312], [320, 321, 322]]
    assert taken[1].tolist() == [[200], [210]]


@pytest.mark.parametrize("aside", [False, True])
def test_every_call_keeps_its_log_probabilities(aside: bool) -> None:
    """Of two queued calls, the second one ahead of what the first one's copies wait for."""
    side = LateCopies() if aside else None
    calls = [GraphTokens(2, 3, torch.device("cpu"), side) for _ in range(2)]  # type: ignore[arg-type]
    sampled = torch.zeros(3, dtype=torch.int64)
    outputs = [torch.zeros(3, width, dtype=dtype) for width, dtype in OUTPUTS]
    for number, tokens in enumerate(calls):
        for step in range(2):
            sampled.fill_(10 * number + step)
            for each in outputs:
                each.copy_(torch.arange(3).unsqueeze(1) + 100 * number + 10 * step)
            tokens.store(step, sampled, *outputs)
        tokens.send(2, logprobs=True)
    asked = np.array([2, NO_LOGPROBS, 0], np.int64)
    kept = []
    for tokens in calls:
        assert (tokens.collect(2, 3) // 10 == len(kept)).all()
        kept.append(tokens.logprobs(2, asked))
    rows = np.arange(3)
    for number, logprobs in enumerate(kept):  # still theirs, whatever was collected since
        for step in range(2):
            given = logprobs.logprobs(step, rows, np.zeros(3, np.int32))
            assert given is not None and given.at.tolist() == [0, 2]
            base = 100 * number + 10 * step
            assert given.chosen.tolist() == [base, base + 2]
            assert given.ids.tolist() == [[base, base], [NO_TOKEN, NO_TOKEN]]
