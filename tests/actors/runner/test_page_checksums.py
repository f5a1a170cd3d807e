"""Pages whose bits change are found out before they are shared; nothing else is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayfin.actors import failpoints
from rayfin.actors.errors import PageCorrupted
from rayfin.actors.failpoints import Failpoints
from rayfin.actors.messages import Sampling
from rayfin.actors.runner.page_checksums import PageChecksums

Make = Callable[..., Any]


def _checksums(engine: Any) -> PageChecksums:
    observers = engine.runner._observers
    return next(own for own in observers if isinstance(own, PageChecksums))


PROMPT = [5, 9, 3, 100, 7, 7, 60, 2, 44, 31, 8, 17, 90]
OUTPUT = 9


@pytest.mark.parametrize("page", [0, 1, 2])
@pytest.mark.parametrize("tensor", [0, 3])
def test_a_bit_that_flips(
    page: int, tensor: int, tiny_model: Make, served: Make, request_of: Make
) -> None:
    engine = served(tiny_model("llama").folder, check_pages=True)
    engine.run(request_of(0, PROMPT, OUTPUT))
    held = _checksums(engine)._pages[tensor]
    held[page, held.shape[1] // 2] ^= 16
    with pytest.raises(PageCorrupted, match=rf"pages \[{page}\]"):
        engine.run(request_of(1, PROMPT, OUTPUT))


def test_whoever_does_not_read_it_goes_on(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny = tiny_model("llama")
    engine = served(tiny.folder, check_pages=True)
    engine.run(request_of(0, PROMPT, OUTPUT))
    _checksums(engine)._pages[0][2] ^= 1  # of tokens 8 to 11, which this prompt has not
    other = [*PROMPT[:8], 4, 4, 4, 4, 4]
    assert engine.run(request_of(1, other, OUTPUT))[1] == tiny.greedy(other, OUTPUT)
    assert engine.cached[1] == 8


def test_planted(
    tiny_model: Make, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served(tiny_model("llama").folder, check_pages=True)
    monkeypatch.setattr(failpoints, "ACTIVE", Failpoints("runner.page=flip@once"))
    engine.run(request_of(0, PROMPT, OUTPUT))
    with pytest.raises(PageCorrupted):
        engine.run(request_of(1, PROMPT, OUTPUT))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_pages": 12},  # pages are taken away and filled anew
        {"num_pages": 12, "preemption": "swap", "scheduler": "v0"},
        {"max_lease": 8},
        {"kv_cache_dtype": "bfloat16"},
    ],
)
def test_no_false_alarm(
    settings: dict[str, Any], tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Many requests that share, fork, are preempted and reuse pages: the same tokens as without."""
    torch.manual_seed(3)
    heads = [torch.randint(3, 120, (9,)).tolist() for _ in range(3)]
    tails = [torch.randint(3, 120, (1 + index % 7,)).tolist() for index in range(18)]
    sampling = Sampling(temperature=0.9, seed=5)
    runs = []
    for check in (True, False):
        engine = served(tiny_model("llama").folder, check_pages=check, **settings)
        requests = [
            request_of(key, [*heads[key % 3], *tail], OUTPUT, sampling=sampling)
            for key, tail in enumerate(tails)
        ]
        runs.append(engine.run(*requests, stagger=1))
        assert any(engine.cached.values())
    assert runs[0] == runs[1]
