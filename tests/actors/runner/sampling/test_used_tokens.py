"""Counts of tokens against collections.Counter."""

import random
from collections import Counter

import numpy as np

from rayfin.actors.runner.sampling.device_rules import TokenCounts


def reported(used: TokenCounts) -> dict[int, int]:
    return dict(zip(used.tokens.tolist(), used.counts.tolist(), strict=True))


def test_counts() -> None:
    numbers = random.Random(0)
    prompt = [numbers.randrange(40) for _ in range(30)]
    output = [numbers.randrange(20, 60) for _ in range(20)]
    used = TokenCounts(np.array(prompt, np.int32), np.array(output, np.int32))
    for _ in range(600):  # past the places that were taken at first
        expected = dict.fromkeys(prompt, 0) | Counter(output)
        assert reported(used) == expected and len(used) == len(expected)
        output.append(numbers.randrange(2000))
        used.add(output[-1])


def test_nothing_yet() -> None:
    used = TokenCounts(np.zeros(0, np.int32), np.zeros(0, np.int32))
    assert reported(used) == {}
    used.add(7)
    assert reported(used) == {7: 1}
