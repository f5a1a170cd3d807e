"""Planted faults: read strictly, happen when their conditions hold, and never by themselves."""

import os
from pathlib import Path

import numpy as np
import pytest

from rayfin.actors import failpoints
from rayfin.actors.errors import InjectedFault, InvalidConfig
from rayfin.actors.failpoints import ACTIONS, POINTS, Failpoints

TOKENS = np.array([5, 777, 9], np.int32)


def test_off_by_default() -> None:
    assert failpoints.ACTIVE is None


@pytest.mark.parametrize(
    "text",
    ["nowhere=raise", "runner.row", "runner.row=explode", "runner.row=raise@moon:3", "runner.row="],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="failpoints"):
        Failpoints(text)


def test_docstring_names_all() -> None:
    assert failpoints.__doc__ is not None
    words = set(failpoints.__doc__.replace(",", " ").replace(":", " ").replace("[", " ").split())
    assert words >= {*POINTS, *ACTIONS, *failpoints.CONDITIONS}


def test_conditions_hold_together() -> None:
    points = Failpoints("runner.row=nan@token:777@step:3; runner.row=raise:own words@epoch:2")
    assert points.hit("runner.row", epoch=0, step=3, tokens=TOKENS) == "nan"
    assert points.hit("runner.row", epoch=0, step=3, tokens=TOKENS[:1]) is None
    assert points.hit("runner.row", epoch=0, step=4, tokens=TOKENS) is None
    assert points.hit("runner.load") is None
    with pytest.raises(InjectedFault, match="own words"):
        points.hit("runner.row", epoch=2, step=3, tokens=TOKENS[:1])


def test_nth_and_once() -> None:
    points = Failpoints("group.reply=drop@nth:3;group.submit=duplicate@once")
    assert [points.hit("group.reply") for _ in range(4)] == [None, None, "drop", None]
    assert [points.hit("group.submit") for _ in range(3)] == ["duplicate", None, None]


def test_once_among_processes(tmp_path: Path) -> None:
    text = f"scheduler.tick=oom@once:{tmp_path / 'mark'}"
    with pytest.raises(MemoryError):
        Failpoints(text).hit("scheduler.tick")
    Failpoints(text).hit("scheduler.tick")  # another process


def test_probability_has_a_seed() -> None:
    def draws(seed: int) -> list[str | None]:
        points = Failpoints(f"group.reply=drop@p:0.3:{seed}")
        return [points.hit("group.reply") for _ in range(200)]

    assert draws(1) == draws(1) != draws(2)
    assert 30 < draws(1).count("drop") < 90


def test_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "faults"
    points = Failpoints(f"@{file}")
    assert points.hit("group.reply") is None
    for number, word in enumerate(["drop", "duplicate"], 1):
        file.write_text(f"group.reply={word}")
        os.utime(file, ns=(number, number))
        assert points.hit("group.reply") == word
    file.unlink()
    assert points.hit("group.reply") is None
