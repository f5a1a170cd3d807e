"""Stop strings in pieces against the obvious search in the whole text."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.deployments.text.stop_strings import StopStrings

LETTERS = st.text("ab\n", max_size=12)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def whole_text(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, start, stop = min(found)
    return text[: end if include else start], stop


@settings(max_examples=400)
@given(pieces=st.lists(LETTERS, max_size=10), stops=STOPS, include=st.booleans())
def test_any_cutting_gives_what_the_whole_text_gives(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopStrings(stops, include)
    emitted, hit = "", None
    for i, piece in enumerate(pieces):
        text, hit = matcher.push(piece)
        emitted += text
        if hit is not None:
            break
        held = len("".join(pieces[: i + 1])) - len(emitted)
        assert held <= max((len(stop) - 1 for stop in stops), default=0)
    if hit is None:
        emitted += matcher.flush()
    assert (emitted, hit) == whole_text("".join(pieces), stops, include)


def test_nothing_is_held_that_cannot_become_a_stop() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.push("T") == ("ENT", None)


def test_unarmed_text_passes_and_is_not_found_later() -> None:
    matcher = StopStrings(["b", "abc"])
    assert matcher.push("ab", armed=False) == ("", None)
    assert matcher.push("x") == ("abx", None)
    assert matcher.push("ab") == ("a", "b")


def test_a_stop_may_end_in_armed_text() -> None:
    matcher = StopStrings(["abc"])
    matcher.push("ab", armed=False)
    assert matcher.push("c") == ("", "abc")


def test_long_stop_strings_stay_fast() -> None:
    matcher = StopStrings(["a" * 4096])
    emitted = "".join(matcher.push("a" * 63 + "b")[0] for _ in range(200)) + matcher.flush()
    assert len(emitted) == 200 * 64


def test_a_character_costs_the_same_behind_a_long_start() -> None:
    """Of strings that differ late, no start is compared again with what is held."""
    steps = 0
    compare = str.__getitem__

    class Counted(str):
        def __getitem__(self, index: Any) -> str:
            nonlocal steps
            steps += 1
            return compare(self, index)

    stops = [Counted("a" * 300 + "b" * 300) for _ in range(4)]
    matcher = StopStrings([*stops, "a" * 900])
    for _ in range(800):
        assert matcher.push("a") == ("", None)
    before = steps
    assert matcher.push("a") == ("", None)
    assert steps - before <= 8 * len(stops)
