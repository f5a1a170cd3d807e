"""Keys and values shared and copied by a fork are those that would be computed."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rayfin.actors.messages import COPY, Sampling

pytestmark = pytest.mark.slow(reason="many engines")

Make = Callable[..., Any]


def _prompt(length: int) -> list[int]:
    numbers = random.Random(length)
    return [numbers.randrange(3, 128) for _ in range(length)]


def _choices(request_of: Make, first: int, length: int, *, siblings: bool, **sampling: Any) -> Any:
    requests = [
        request_of(first + i, _prompt(length), 12, sampling=Sampling(seed=i, **sampling))
        for i in range(4)
    ]
    if not siblings:
        return requests
    return [requests[0], *(replace(own, parent_key=first) for own in requests[1:])]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_forked_choices_equal_lone_ones(
    family: str, page_size: int, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Seeded and greedy, in chunks of the prompt; longer than every sliding window."""
    tiny = tiny_model(family)
    for length in (1, 17, 21):
        settings = {"page_size": page_size, "prefix_caching": False}
        lone = served(tiny.folder, **settings)
        forked = served(tiny.folder, max_batch_tokens=10, **settings)
        for number, sampling in enumerate([{"temperature": 1.3}, {}]):
            alone = _choices(request_of, 10 * number, length, siblings=False, **sampling)
            expected = {own.key: lone.run(own)[own.key] for own in alone}
            together = _choices(request_of, 10 * number, length, siblings=True, **sampling)
            assert forked.run(*together) == expected
        copies = sum(int((step.moves[:, 0] == COPY).sum()) for step in forked.steps)
        windows = forked.config.windows
        groups = 1 if windows is None else windows.pages_per_entry
        assert copies == (0 if (length - 1) % page_size == 0 else 6 * groups)
        assert forked.cached[11] == length - 1


def test_pressure(tiny_model: Make, served: Make, request_of: Make) -> None:
    """Forked choices that are preempted go on as if nothing had been."""
    tiny = tiny_model("llama")
    settings = {"prefix_caching": False, "page_size": 4, "max_model_len": 40}
    lone, tight = served(tiny.folder, **settings), served(tiny.folder, num_pages=12, **settings)
    alone = _choices(request_of, 0, 18, siblings=False, temperature=1.0)
    expected = {own.key: lone.run(own)[own.key] for own in alone}
    assert tight.run(*_choices(request_of, 0, 18, siblings=True, temperature=1.0)) == expected
    assert tight.engine.stats().preemptions > 0
