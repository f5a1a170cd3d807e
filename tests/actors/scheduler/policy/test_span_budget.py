"""Where chunks of prompts with images end."""

from types import SimpleNamespace
from typing import Any

import pytest

from rayfin.actors.guidance import Guidance
from rayfin.actors.media.part import MediaInput
from rayfin.actors.scheduler.policy.span_budget import SpanBudget
from rayfin.actors.settings.bidirectional import Bidirectional


def _request(*images: tuple[int, int], prompt: int = 60) -> Any:
    placed = [MediaInput(b"", start, length, {}) for start, length in images]
    return SimpleNamespace(source=SimpleNamespace(parts=placed, prompt=[0] * prompt))


@pytest.mark.parametrize(
    ("computed", "length", "expected"),
    [
        (0, 3, 3),  # up to the image
        (0, 10, 3),  # not into it
        (3, 10, 16),  # longer, to hold it
        (3, 16, 16),
        (7, 5, 12),  # its rest, behind a cached part
        (3, 22, 22),
        (19, 10, 6),
        (25, 60, 60),
    ],
)
def test_chunks_end_outside_of_images(computed: int, length: int, expected: int) -> None:
    budget = SpanBudget(24, Bidirectional("image"))
    budget.begin(0)
    assert budget.cap(_request((3, 16), (25, 16)), computed, length) == expected


def test_an_image_waits_for_room() -> None:
    budget = SpanBudget(24, Bidirectional("image"))
    request = _request((3, 16))
    budget.begin(8)
    assert budget.cap(request, 3, 2) == 16
    budget.take(_request(), 0, 1)
    assert budget.cap(request, 3, 2) == 0 and budget.cap(request, 0, 9) == 3


def test_prompts_are_whole() -> None:
    budget = SpanBudget(64, Bidirectional("prompt"))
    budget.begin(4)
    assert budget.cap(_request(), 0, 8) == 60
    budget.take(_request(), 0, 1)
    assert budget.cap(_request(), 0, 8) == 0
    assert budget.cap(_request(), 60, 2) == 2, "a token of the answer"


def test_a_whole_prompt_may_begin_more_images_than_are_left() -> None:
    budget = SpanBudget(200, Bidirectional("prompt"))
    budget.begin(4)
    pictures, guided = _request((3, 16), (25, 16)), _request()
    guided.source.parts.append(Guidance("a grammar"))
    assert budget.cap(pictures, 0, 60) == 60
    budget.take(pictures, 0, 60)
    assert not budget.allows(pictures), "one image beside streams"
    assert budget.allows(guided) and budget.cap(guided, 0, 60) == 60


def test_other_images_are_cut_anywhere() -> None:
    budget = SpanBudget(24, Bidirectional())
    budget.begin(0)
    assert budget.cap(_request((3, 16)), 0, 9) == 9
    budget.begin(1)
    assert budget.cap(_request((3, 16), (25, 16)), 0, 60) == 25, "one image beside streams"
