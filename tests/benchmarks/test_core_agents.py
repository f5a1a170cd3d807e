"""Sessions in virtual time: the policy pays under pressure, and is not felt without."""

from argparse import Namespace
from dataclasses import replace

import pytest
from core_agents import SHAPES, measure

from rayfin.deployments.bench.agents import AgentFigures

SMALL = replace(SHAPES["cores"], agents=6, scale=1 / 8, page_size=4)


def figures(
    pressure: float, *, sessions: bool, pauses: str = "mixed", nameless: bool = False
) -> AgentFigures:
    options = Namespace(pauses=pauses, sessions=2, nameless=nameless, chats=0, small=0)
    return measure(SMALL, pressure, sessions=sessions, seed=1, options=options)[0]


def test_with_room_nothing_changes() -> None:
    assert figures(0.4, sessions=True) == figures(0.4, sessions=False)


@pytest.mark.parametrize("nameless", [False, True])
def test_under_pressure_a_session_takes_less(nameless: bool) -> None:
    without, with_seats = (
        figures(2.0, sessions=on, pauses="quick", nameless=nameless) for on in (False, True)
    )
    assert with_seats.mean < 0.8 * without.mean
    assert with_seats.cached > without.cached + 0.1
    assert with_seats.sessions == without.sessions == 12


@pytest.mark.parametrize("pauses", ["slow", "two"])
def test_no_pauses_make_it_much_worse(pauses: str) -> None:
    without, with_seats = (figures(1.5, sessions=on, pauses=pauses) for on in (False, True))
    assert with_seats.mean < 1.1 * without.mean
