"""Tokens on their way from the device, with copies that are made as late as they may be."""

from collections.abc import Callable

import pytest
import torch

from rayfin.actors.runner.gpu.graph_tokens import GraphTokens


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
