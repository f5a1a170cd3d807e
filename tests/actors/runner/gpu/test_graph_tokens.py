"""Tokens on their way from the device, with copies that are made as late as they may be."""

import pytest
import torch

from rayfin.actors.runner.gpu.graph_tokens import GraphTokens


class LateCopies:
    """A side stream of which nothing is seen before somebody waits for it."""

    def __init__(self) -> None:
        self.begun: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.begun.append((target, source))

    def wait(self) -> None:
        for target, source in self.begun:
            target.copy_(source)
        self.begun.clear()


@pytest.mark.parametrize("aside", [False, True])
def test_every_step_keeps_its_tokens(aside: bool) -> None:
    """Though all steps sample into one tensor, and copies are late; of two leases in turn."""
    side = LateCopies() if aside else None
    tokens = GraphTokens(3, 4, torch.device("cpu"), side)  # type: ignore[arg-type]
    assert len(tokens) == 3
    sampled = torch.empty(4, dtype=torch.int64)
    taken = []
    for num_steps, bucket in ((3, 4), (2, 2)):
        for step in range(num_steps):
            sampled.copy_(torch.arange(4) + 10 * step + 100 * num_steps)
            tokens.store(step, sampled[:bucket])
            assert side is None or len(side.begun) == step + 1
        taken.append(tokens.collect(num_steps, bucket - 1))
        assert side is None or not side.begun
    assert [array.dtype for array in taken] == ["int32", "int32"]
    assert taken[0].tolist() == [[300, 301, 302], [310, 311, 312], [320, 321, 322]]
    assert taken[1].tolist() == [[200], [210]]
