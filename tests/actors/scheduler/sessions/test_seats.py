"""Seats: some sessions wait whole, and the others keep their pages."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayfin.actors.errors import Overloaded
from rayfin.actors.messages import Command, SessionRef
from rayfin.actors.timing import (
    ENGINE_STALL_SECONDS,
    LOBBY_TICK_SECONDS,
    PARKED_IDLE_SECONDS,
    PARKED_SECONDS,
)

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

    def ask(self, name: int, *, parent: str = "", nameless: bool = False, **wishes: Any) -> Any:
        prompt = self.tokens.get(name) or context(name)
        flags = {flag: wishes.pop(flag, False) for flag in ("final", "fresh", "aside")}
        session = None if nameless else SessionRef(f"s{name}", parent, **flags)
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


def _parked(agents: Agents) -> list[Any]:
    """The streams whose requests are parked."""
    return [agents.h.streams["a", request.source.key] for request in _seats(agents)._parked]


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


def test_one_name_of_many_requests_is_limited_like_others(harness: Make) -> None:
    """As where all users of a product have one ``prompt_cache_key``."""
    h = harness(page_size=PAGE, num_pages=60, max_decoding_batch=2, max_waiting_requests=3)
    key = SessionRef("product")
    h.add(8, session=key)
    h.run()
    streams = [h.add(8, session=key) for _ in range(2)]  # a pause ends, and another
    while any(not stream.tokens for stream in streams):
        h.step()
    assert len(h.engine.lifecycle.state.running) == 2  # side by side
    for _ in range(3):
        h.add(8, session=key)
    with pytest.raises(Overloaded):
        h.add(8, session=key)
    h.run()
    h.check()


def test_one_name_of_many_requests_takes_no_room_from_others(harness: Make) -> None:
    """However many of its requests wait in the queue."""
    h = harness(page_size=PAGE, num_pages=60, max_decoding_batch=2, step_seconds=0.01)
    for _ in range(12):
        h.add(40, 4, session=SessionRef("product"))
    agents = Agents(h)
    first = agents.ask(0)
    assert not first.waited
    h.run()
    h.check()


@pytest.mark.parametrize("mode", ["idle", "shared"])
def test_batches_give_way_to_parked_turns(harness: Make, mode: str) -> None:
    h = harness(page_size=PAGE, num_pages=30, step_seconds=0.01, batch_mode=mode)
    batch = [h.add(12, 8 + number % 5, background=True) for number in range(40)]
    for _ in range(3):
        h.step()
    assert len(h.engine.lifecycle.state.running) > 5  # all memory
    turn = Agents(h).ask(0)
    while turn.open:
        h.step()
        h.wait()
    assert sum(not stream.open for stream in batch) < 8
    h.run()
    h.check()


def _chats(agents: Agents, least_free: int) -> None:
    """Chats of four pages, that begin one after another while so many pages are free."""
    while agents.h.engine.lifecycle.state.tables.pool.num_free >= least_free:
        agents.h.add(6, 10)
        agents.h.step()


def test_later_chats_do_not_starve_a_parked_turn(harness: Make) -> None:
    """Of whom more than fit have come at any time."""
    agents = Agents(harness(page_size=PAGE, num_pages=30, max_decoding_batch=16, step_seconds=0.1))
    _chats(agents, 8)
    turn = agents.h.add(72, 4, session=SessionRef("large"))
    before = agents.h.num_added
    assert turn.waited
    while not turn.tokens:
        if not len(agents.h.engine.lifecycle.state.waiting):
            agents.h.add(6, 10)
        agents.h.step()
        assert agents.h.num_added < before + 20
    agents.h.run()
    agents.h.check()


def test_chats_that_never_wait_starve_no_turn_for_longer_than_the_limit(agents: Agents) -> None:
    _chats(agents, 8)
    turn, began = agents.ask(0), agents.h.executor.clock
    while not turn.tokens:
        if turn in _parked(agents):
            _chats(agents, 8)
        agents.h.step()
        agents.pause(1.0)
        assert agents.h.executor.clock - began < PARKED_SECONDS + 60.0
    assert agents.h.executor.clock - began > PARKED_SECONDS
    agents.h.run()
    agents.h.check()


def test_where_nothing_runs_a_seat_is_had_before_the_engine_seems_stalled(agents: Agents) -> None:
    agents.h.executor.token_seconds = 20.0
    agents.pair()
    agents.h.executor.token_seconds = 0.1
    waiting = agents.ask(2)
    agents.h.abort(waiting)
    agents.pause(100.0)
    agents.turn(0)  # its pause is over, and another begins
    lapses = dict(agents.h.engine.stats().session_lapses)
    third, began = agents.ask(2), agents.h.executor.clock
    assert lapses == agents.h.engine.stats().session_lapses  # nothing was idle meanwhile
    while not third.tokens:
        agents.h.step()
        agents.h.wait()
    waited = agents.h.executor.clock - began
    assert waited < PARKED_IDLE_SECONDS + 10.0 < ENGINE_STALL_SECONDS
    agents.h.run()
    agents.h.check()


def test_an_idle_engine_waits_no_longer_than_the_pages_that_are_taken_cost(agents: Agents) -> None:
    """Two of them, 0.8 s, and not for the 4 s of the whole prompt, which a step of 3.2 s begins."""
    agents.pair()
    third, began = agents.ask(2), agents.h.executor.clock
    while third in _parked(agents):
        agents.h.step()
        agents.h.wait()
    assert agents.h.executor.clock - began < 4.5
    agents.h.run()
    agents.h.check()


def test_a_seat_passes_on_as_soon_as_a_session_pauses(agents: Agents) -> None:
    agents.pair()
    third, last = agents.ask(2), agents.ask(0, final=True)
    while last.open:
        agents.h.step()
    assert not third.tokens and agents.h.engine.has_steps
    ended = agents.h.executor.clock
    agents.h.step()
    assert agents.h.engine.stats().parked == 0 and agents.h.executor.clock > ended
    agents.h.run()
    agents.h.check()


def test_a_conversation_without_a_name_has_a_seat_from_its_second_turn_on(agents: Agents) -> None:
    agents.turn(0, *range(9), nameless=True)
    assert _seats(agents).sessions.num_seated == 0
    agents.turn(0, *range(9), nameless=True)
    assert _seats(agents).sessions.num_seated == 1
    session = _seats(agents).sessions.seated[0]
    assert len(_seats(agents).sessions) == 1 and not _seats(agents).sessions.digests()
    agents.turn(0, nameless=True)
    agents.h.check()
    assert _seats(agents).sessions.seated == [session] and session.tokens >= 64


def test_a_conversation_without_a_name_waits_whole_too(agents: Agents) -> None:
    agents.turn(2, nameless=True)
    agents.pair()
    assert agents.ask(2, nameless=True).waited
    assert not agents.ask(3, nameless=True).waited  # a first turn
    agents.h.run()
    agents.h.check()


@pytest.mark.parametrize("tail", [[3, 4], [5, *range(20)]])
def test_a_common_head_makes_no_conversation(agents: Agents, tail: list[int]) -> None:
    head = context(0)
    agents.h.add([*head, *range(20)], 4)
    agents.h.run()
    agents.h.add([*head, 1, *tail], 4)
    agents.h.add([*head, *range(20)], 4)  # the same again
    agents.h.run()
    agents.h.check()
    assert _seats(agents).sessions.num_seated == 0


def test_answers_may_come_back_without_their_opening(agents: Agents) -> None:
    first = context(0)
    agents.h.add([*first, 7, 8, 9, 7, 8, 9], 4)
    agents.h.run()
    agents.h.add([*first, *range(30, 40)], 4)
    agents.h.run()
    agents.h.check()
    assert _seats(agents).sessions.num_seated == 1


def test_who_pauses_since_the_last_ranking_loses_its_seat_too(agents: Agents) -> None:
    agents.pair()
    seats = _seats(agents)
    assert seats.reclaim() and seats.sessions.num_seated == 1
    lapsed = next(each for each in seats.sessions._known.values() if each.seated is None)
    seats._ranked, seats._ranked_until = [(0.0, lapsed)], float("inf")
    assert seats.reclaim() and seats.sessions.num_seated == 0


def test_an_engine_that_drains_keeps_no_seats(agents: Agents) -> None:
    agents.pair()
    third = agents.ask(2)
    agents.h.engine.drain()
    agents.h.step()
    assert agents.h.engine.stats().parked == 0
    agents.h.run()
    agents.h.check()
    assert third.tokens


def test_seats_that_are_free_at_once_are_shared_fairly(harness: Make) -> None:
    h = harness(page_size=PAGE, num_pages=30, policy="fair", step_seconds=0.01)
    large = h.add(76, 4, session=SessionRef("large", final=True), tenant="c")
    h.step()
    agents = Agents(h)
    waiting = [agents.ask(name, tenant="ab"[name > 1]) for name in range(4)]
    assert all(stream.waited for stream in waiting)
    while large.open:
        h.step()
    h.step()
    seated = {session.key[0] for session in h.engine.lifecycle.seats.sessions.seated}
    assert seated == {"a", "b"}
    h.run()
    h.check()


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
            final, nameless = draw.random() < 0.1, name == 1
            stream = agents.ask(name, final=final, tenant=f"t{name % 2}", nameless=nameless)
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


def test_after_a_failed_step_none_has_a_seat(agents: Agents) -> None:
    """Of a request that has left its slot meanwhile: what others have claimed may be wrong."""
    agents.turn(0)
    h = agents.h
    h.add([7] * 9, 12)
    h.step()
    failing = h.add(9, 3)
    h.executor.errors.add((failing.seed, 0))
    h.step()
    h.abort(failing)
    assert _names(agents) == ["s0"]
    h.step()
    assert _names(agents) == []
    h.run()
    h.check()
