"""The benchmark of loads beside streams: its gaps, its table, its bars."""

from typing import Any

from lora import PHASES, Phase, Stream, gaps_within, load_rows, verdicts


def found() -> dict[str, Phase]:
    """Gaps of 100 ms, 3 % of them longer beside loads."""
    longest = zip(PHASES, (0.1, 0.11, 0.15), strict=True)
    phases = {name: Phase([0.1] * 97 + [long] * 3) for name, long in longest}
    phases["known"].first = [0.2, 0.3, 0.25]
    phases["new"].first = [0.4, 0.6]
    return phases


def test_a_gap_belongs_to_the_phase_that_has_all_of_it() -> None:
    stream: Any = Stream([0.0, 1.0, 2.5, 3.0])
    assert gaps_within(stream.times, 1.0, 3.5) == [1.5, 0.5]
    assert gaps_within(stream.times, 0.5, 3.0) == [1.5]


def test_rows_and_bars() -> None:
    _, _, alone, known, new = load_rows(found())
    assert alone == "| alone | 100.0 | 100.0 | 1.00 | 0 |  |  |"
    assert known == "| known | 100.0 | 110.0 | 1.10 | 3 | 250 | 300 |"
    assert new == "| new | 100.0 | 150.0 | 1.50 | 2 | 500 | 600 |"
    assert verdicts(found()) == [
        "p99 of gaps beside loads / alone: 1.50 (at most 1.2)",
        "first token of an adapter that is read: 0.60 s (at most 0.5)",
    ]
