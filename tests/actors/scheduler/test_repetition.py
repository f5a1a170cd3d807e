"""Outputs that repeat themselves end, at the token that an obvious search finds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rayfin.actors.messages import Repetition
from rayfin.actors.scheduler.repetition import OutputRepeats


def repeats(output: Sequence[int], rule: Repetition) -> bool:
    """Whether some pattern stands at the end of the output so many times: the obvious search."""
    if len(output) < rule.after:
        return False
    for size in range(rule.shortest, rule.longest + 1):
        end = list(output[-size * rule.copies :])
        if len(end) == size * rule.copies and end == end[:size] * rule.copies:
            return True
    return False


@pytest.mark.parametrize("alphabet", [1, 2, 3])
def test_as_the_obvious_search(alphabet: int) -> None:
    draw = np.random.default_rng(alphabet)
    for _ in range(60):
        shortest = int(draw.integers(1, 4))
        rule = Repetition(
            shortest + int(draw.integers(0, 5)),
            shortest,
            int(draw.integers(2, 5)),
            int(draw.integers(0, 20)),
        )
        output, found = draw.integers(0, alphabet, 80).tolist(), OutputRepeats(rule)
        for end in range(len(output)):
            assert found.push(output[end]) == repeats(output[: end + 1], rule)


@pytest.mark.parametrize("pages", [10, 64])
@pytest.mark.parametrize("lease", [1, 4])
def test_requests_end(harness: Callable[..., Any], lease: int, pages: int) -> None:
    """Also where the runner has sampled further, and after preemptions and resubmissions."""
    h = harness(vocab_size=3, max_lease=lease, num_pages=pages, max_model_len=40)
    rule = Repetition(4, 1, 3)
    streams = [h.add(3, 30, repetition=rule) for _ in range(12)]
    streams.append(h.add(3, 30))
    streams.append(h.add(3, 30, output=h.expected(streams[0])[0][:2], repetition=rule))
    h.run()
    early = 0
    for stream in streams:
        tokens = h.expected(stream)[0]
        ends = (n for n in range(3, len(tokens)) if repeats(tokens[:n], rule))
        end = next(ends, None) if stream.source.stopping.repetition else None
        assert stream.tokens == tokens[:end]
        if end is not None:
            early += 1
            assert stream.ended.stop_reason == "repetition_detected"
        assert stream.ended.finish_reason == ("length" if end is None else "repetition")
    assert early > 5
    assert h.engine.stats().finished == {"repetition": early, "length": len(streams) - early}
    assert not h.engine.lifecycle.state.repetitions.watched
