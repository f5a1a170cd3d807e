"""Seats: some sessions wait whole, and the others keep their pages."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfin.actors.messages import Command, SessionRef
from rayfin.actors.timing import LOBBY_TICK_SECONDS, PARKED_SECONDS

Make = Callable[..., Any]
PAGE, CONTEXT = 4, 40  # tokens of a page, and of a first prompt: ten pages


def context(name: int) -> list[int]:
    """The first prompt of a session, which shares nothing with another's."""
    return [(name + 1) % 50, *((7 * name + i * i) % 50 for i in range(CONTEXT - 1))]


class Agents:
    """Sessions of one engine, each with its context so far."""

    def __init__(self, h: Any) -> None:
        self.h = h
        self.tokens: dict[int, list[int]] = {}

    def ask(self, name: int, *, parent: str = "", **wishes: Any) -> Any:
        prompt = self.tokens.get(name) or context(name)
        flags = {flag: wishes.pop(flag, False) for flag in ("final", "fresh", "aside")}
        session = SessionRef(f"s{name}", parent, **flags)
        return self.h.add(prompt, 4, session=session, **wishes)

    def hear(self, name: int, stream: Any, *more: int) -> None:
        """The answer, and what the next turn adds, are in the session's context."""
        self.tokens[name] = [*stream.source.prompt.tolist(), *stream.tokens, *more]

    def turn(self, name: int, *more: int, **wishes: Any) -> Any:
        stream = self.ask(name, **wishes)
        self.h.run()
        self.hear(name, stream, *(more or (1, 2)))
        return stream

    def pair(self) -> None:
        """The first turns of two sessions, side by side, after which no third one has room."""
        streams = [self.ask(name) for name in (0, 1)]
        self.h.run()
        for name, stream in enumerate(streams):
            self.hear(name, stream, 1, 2)

    def pause(self, seconds: float) -> None:
        self.h.executor.clock += seconds


@pytest.fixture
def agents(harness: Make) -> Agents:
    """Room for two sessions and a half; a token of a prompt takes a tenth of a second."""
    h = harness(page_size=PAGE, num_pages=30, max_model_len=80, step_seconds=0.01)
    h.executor.token_seconds = 0.1
    return Agents(h)


def _seats(agents: Agents) -> Any:
    return agents.h.engine.lifecycle.seats


def _names(agents: Agents) -> list[str]:
    return [session.key[1] for session in _seats(agents).sessions.seated]


def test_with_room_a_seat_is_had_at_once(agents: Agents) -> None:
    first = agents.turn(0)
    assert _names(agents) == ["s0"]
    claimed = agents.h.engine.lifecycle.state.tables.claims
    assert len(claimed) == (CONTEXT + 3) // PAGE
    assert agents.turn(0).ended.cached_tokens == (CONTEXT + 3) // PAGE * PAGE
    agents.h.check()
    assert first.ended.queued == 0.0 and agents.h.engine.stats().parked == 0


def test_a_third_session_waits_whole_until_another_is_late(agents: Agents) -> None:
    agents.pair()
    third = agents.ask(2)
    stats = agents.h.engine.stats()
    assert (stats.parked, stats.waiting, stats.deferred, stats.sessions_seated) == (1, 1, 1, 2)
    assert not agents.h.engine.has_steps
    again = agents.ask(0)  # a turn of a seat passes it, and finds all of its pages
    while again.open:
        agents.h.step()
    assert again.ended.cached_tokens == 40 and third.open and not third.tokens
    agents.h.run()
    agents.h.check()
    assert _names(agents)[-1] == "s2" and len(_names(agents)) == 2
    assert agents.h.engine.stats().session_lapses["price"] == 1


def test_chats_take_the_seat_of_least_worth_whole(agents: Agents) -> None:
    agents.turn(0)
    agents.pause(60.0)
    agents.turn(1)
    chat = agents.h.add([9] * 60, 4)
    agents.h.run()
    agents.h.check()
    assert not chat.waited and _names(agents) == ["s1"]
    assert agents.h.engine.stats().session_lapses["pages"] == 1
    assert agents.turn(1).ended.cached_tokens == 40
    assert agents.h.engine.stats().session_tokens_again == 0
    cached = agents.turn(0).ended.cached_tokens
    assert cached < 40 and agents.h.engine.stats().session_tokens_again == 40 - cached


@pytest.mark.parametrize(
    "wishes",
    [{"background": True}, {"prompt_logprobs": 0}, {"aside": True}],
)
def test_what_is_no_turn_is_never_parked(agents: Agents, wishes: dict[str, Any]) -> None:
    agents.pair()
    assert not agents.ask(2, **wishes).waited
    agents.h.run()
    agents.h.check()


def test_a_parked_turn_ends_like_any_that_waits(agents: Agents) -> None:
    agents.pair()
    aborted, late, third = agents.ask(2), agents.ask(3, timeout=0.5), agents.ask(4)
    agents.h.abort(aborted)
    assert agents.h.engine.stats().parked == 2
    agents.h.run()
    agents.h.check()
    assert late.ended.error is not None or late.tokens
    assert third.tokens and not _seats(agents).sessions.turns


def test_a_final_turn_leaves_nothing(agents: Agents) -> None:
    agents.turn(0)
    agents.turn(0, final=True)
    assert _names(agents) == [] and len(_seats(agents).sessions) == 0
    assert len(agents.h.engine.lifecycle.state.tables.claims) == 0


def test_a_title_takes_no_context_away_and_a_compaction_does(agents: Agents) -> None:
    agents.turn(0)
    claims = agents.h.engine.lifecycle.state.tables.claims
    session = _seats(agents).sessions.seated[0]
    before = claims.pages(session)
    title = agents.h.add([3] * 20, 4, session=SessionRef("s0"))
    agents.h.run()
    assert title.tokens and claims.pages(session) == before
    agents.h.add([3] * 24, 4, session=SessionRef("s0"))  # and again
    agents.h.run()
    assert len(claims.pages(session)) == 6 and set(claims.pages(session)).isdisjoint(before)
    agents.h.add([5] * 20, 4, session=SessionRef("s0", fresh=True))
    agents.h.run()
    assert len(claims.pages(session)) == 5


def test_a_child_takes_its_parents_place(agents: Agents) -> None:
    agents.pair()
    other = agents.ask(2)
    child = agents.ask(3, parent="s1")
    order = []
    while other.open or child.open:
        agents.h.step()
        agents.h.wait()
        order += [name for name, stream in (("other", other), ("child", child)) if stream.tokens]
    assert order[0] == "child"
    agents.h.run()


def test_new_runners_keep_who_is_parked_in_order(agents: Agents) -> None:
    agents.pair()
    waiting = [agents.ask(name) for name in (2, 3, 4)]
    agents.h.engine.carry_out(Command.RESET_CACHE)
    assert _names(agents) == []
    agents.h.run()
    agents.h.check()
    entered = [seed for seed in agents.h.executor.entered if seed >= waiting[0].seed]
    assert entered == [stream.seed for stream in waiting]


def test_who_waits_long_takes_a_seat_at_its_pause(agents: Agents) -> None:
    """Though the seats are in use all the time, with pauses of a tick between turns."""
    agents.pair()
    third, began = agents.ask(2), agents.h.executor.clock
    turns = 0
    while not third.tokens:
        streams = {name: agents.ask(name) for name in (0, 1) if f"s{name}" in _names(agents)}
        while any(stream.open for stream in streams.values()):
            agents.h.step()
            agents.h.wait()
        agents.pause(LOBBY_TICK_SECONDS)
        agents.h.step()
        turns += 1
        assert agents.h.executor.clock - began < 2 * PARKED_SECONDS
    assert turns > 5
    agents.h.run()
    agents.h.check()


@given(
    data=st.data(),
    sessions=st.integers(1, 5),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    seed=st.integers(0, 999),
)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_with_ample_memory_nothing_changes(
    harness: Make, data: st.DataObject, sessions: int, policy: str, seed: int
) -> None:
    """S5: each step is the same as without seats, whatever sessions do."""
    logs = []
    for on in (False, True):
        draw = random.Random(seed)
        h = harness(
            page_size=PAGE,
            num_pages=400,
            max_model_len=80,
            sessions=on,
            policy=policy,
            step_seconds=0.01,
        )
        agents = Agents(h)
        for _ in range(12):
            name = draw.randrange(sessions)
            stream = agents.ask(name, final=draw.random() < 0.1, tenant=f"t{name % 2}")
            for _ in range(draw.choice([0, 2, 9])):
                h.step()
            if draw.random() < 0.2:
                h.abort(stream)
            elif not stream.open and len(stream.source.prompt) < 60:
                agents.hear(name, stream, 1, 2)
        h.run()
        h.check()
        logs.append([(info.ids.tolist(), info.merge_prompt.tolist()) for info in h.executor.log])
        assert h.engine.stats().session_lapses.get("price", 0) == 0
    assert logs[0] == logs[1]
