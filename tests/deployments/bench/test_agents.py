"""Agents: the plan as a machine without a server, and the client that drives one."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from fake_server import FakeServer
from rayfin.deployments.bench.agents import (
    PAUSES,
    PROFILES,
    AgentClient,
    AgentLoad,
    AgentPlan,
    AgentTurn,
    ScriptTurn,
    agent_figures,
)
from rayfin.deployments.bench.kills import Kill, Kills

SMALL = PROFILES["small"]
TINY = AgentPlan(profile=SMALL, agents=2, sessions=1, scale=1 / 64, pauses=lambda _: 0.0)


def played(plan: AgentPlan, seconds: float = 2.0) -> tuple[AgentLoad, list[AgentTurn]]:
    """All turns in the order of their times; each is answered after so many seconds."""
    load, numbers = AgentLoad(plan), itertools.count()
    queue = [(turn.at, next(numbers), turn) for turn in load.start()]
    heapq.heapify(queue)
    turns = []
    while queue:
        at, _, turn = heapq.heappop(queue)
        turns.append(turn)
        for another in load.answered(turn, at + seconds):
            heapq.heappush(queue, (another.at, next(numbers), another))
    return load, turns


def test_each_agent_runs_its_sessions_one_after_another() -> None:
    load, turns = played(AgentPlan(profile=SMALL, agents=3, sessions=4))
    assert len(load.sessions) == 12
    for agent in range(3):
        mine = [session for session in load.sessions if session.name.startswith(f"0-{agent}-")]
        for before, after in itertools.pairwise(mine):
            assert before.ended is not None and before.ended <= after.started
    for session in load.sessions:
        its = [turn for turn in turns if turn.session is session]
        assert len(its) == session.turns == session.asked
        assert [turn.final for turn in its] == [False] * (len(its) - 1) + [True]
        assert session.ended is not None
        taken = session.ended - session.started
        assert taken == pytest.approx(session.alone + 2.0 * session.turns)
    figures = agent_figures(load, [(True, 9.0), (False, 1.0)], 0.5, 100.0)
    assert (figures.sessions, figures.longest_wait, figures.later_ttft) == (12, 9.0, 1.0)
    assert 0 < figures.fairness <= 1 and figures.p50 <= figures.p95
    assert figures.lines()[-1].startswith("first token of later turns: median 1.00 s")
    silent = agent_figures(load, [], 0.5, 100.0)
    assert silent.lines()[-1] == "no answer had any text · 50.0% of prompts cached"


def test_a_parent_waits_for_its_subagents() -> None:
    load, turns = played(AgentPlan(profile=PROFILES["agentx-tree"], agents=8, scale=1 / 64))
    children = [session for session in load.sessions if session.parent is not None]
    assert children
    for child in children:
        assert child.parent is not None and child.ended is not None
        between = [turn.at for turn in turns if turn.session is child.parent]
        assert not any(child.started < at < child.ended for at in between)
    assert all(session.children == 0 for session in load.sessions)


def test_scripts_are_played_as_they_are() -> None:
    child = (ScriptTurn(1.0, 30, 3),)
    script = (
        ScriptTurn(0.0, 100, 10),
        ScriptTurn(4.0, 20, 5, children=(child, child)),
        ScriptTurn(7.0, 50, 5, fresh=True),
    )
    plan = AgentPlan(profile=SMALL, scripts=(script, child), agents=1, sessions=2, scale=2.0)
    load, turns = played(plan)
    parent, *children, last = load.sessions
    assert [child.parent for child in children] == [parent, parent] and last.parent is None
    its = [turn for turn in turns if turn.session is parent]
    assert [turn.at - its[0].at for turn in its] == pytest.approx([0.0, 5.0, 14.0])
    assert [(turn.added, turn.output) for turn in its] == [(200, 20), (40, 10), (100, 10)]
    assert [turn.fresh for turn in its] == [False, False, True] and parent.tokens == 110
    assert (parent.alone, last.turns) == (7.0, 1)


def test_a_plan_is_its_seed_and_scales() -> None:
    def sizes(scale: float) -> list[int]:
        _, turns = played(AgentPlan(profile=SMALL, agents=2, scale=scale))
        return sorted(turn.added for turn in turns)

    assert sizes(1.0) == sizes(1.0)
    assert sum(sizes(1.0)) == pytest.approx(4 * sum(sizes(0.25)), rel=0.01)


def test_no_turn_is_longer_than_the_model_takes() -> None:
    _, turns = played(AgentPlan(profile=SMALL, agents=4, longest=2000))
    assert max(turn.session.tokens for turn in turns) <= 2000 + SMALL.output


def driven(server: FakeServer, kills: Kills | None = None) -> AgentClient:
    """The client after it has run TINY."""

    async def drive() -> AgentClient:
        async with httpx.AsyncClient(base_url=server.url) as http:
            client = AgentClient(http, "tiny", AgentLoad(TINY), kills)
            await client.run()
            return client

    return asyncio.run(drive())


def test_it_drives_a_server(fake_server: FakeServer) -> None:
    """Each turn sends all messages before it, under its session's name."""
    client = driven(fake_server)
    assert not client.errors
    figures = client.figures()
    assert figures.sessions == 2 and figures.longest_wait > 0
    bodies: list[Any] = fake_server.bodies
    assert len(bodies) == sum(session.turns for session in client.load.sessions)
    longest = max(bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in longest[:3]] == ["user", "assistant", "user"]
    assert longest[1]["content"] == "You said " + longest[0]["content"]
    assert set(PAUSES) >= {"mixed", "slow"}


class KillAmid(Kills):
    """Kills once when a turn is under way."""

    def __init__(self, server: FakeServer, kill: Callable[[str], None]) -> None:
        super().__init__([], kill)
        self._server = server

    async def run(self, now: Callable[[], float]) -> None:
        while not self._server.at_once:
            await asyncio.sleep(0.001)
        self.struck.append(now())
        self.kill("runner")


@pytest.mark.parametrize("harm", [False, True])
def test_what_was_under_way_at_a_kill_is_asked_again(harm: bool) -> None:
    """An answer that is another one then is wrong, and its session with it."""

    class Server(FakeServer):
        lost = ""

        async def _events(self, said: str) -> AsyncIterator[str]:
            async for event in super()._events(said + self.lost):
                yield event

    server, killed = Server(), list[str]()

    def kill(role: str) -> None:
        killed.append(role)
        server.lost = " and more" if harm else ""

    with server.running():
        client = driven(server, KillAmid(server, kill))
    turns = sum(session.turns for session in client.load.sessions)
    assert killed == ["runner"] and len(server.bodies) == turns + client.amid
    assert 1 <= client.amid <= 2 and not client.errors and not client.failed
    assert len(client.wrong) == (client.amid if harm else 0)
    asked_again = [body["messages"] for body in server.bodies[turns:]]
    assert all(messages[-1]["role"] == "user" for messages in asked_again)
    line = client.killed_line([3.2])
    assert line.startswith("1 kills, at 3 s") and f"{len(client.wrong)} wrong" in line


def test_a_session_with_a_failed_turn_has_failed() -> None:
    class Server(FakeServer):
        asked = 0

        async def _events(self, said: str) -> AsyncIterator[str]:
            self.asked += 1
            async for event in super()._events(said + " error" * (self.asked == 3)):
                yield event

    with (server := Server()).running():
        client = driven(server)
    assert len(client.failed) == 1 and sum(client.errors.values()) == 1
    assert all(session.ended is not None for session in client.load.sessions)


def test_kills_come_in_their_order() -> None:
    killed: list[str] = []
    kills = Kills([Kill("engine", 0.02), Kill("scheduler", 0.0)], killed.append)
    asyncio.run(kills.run(iter([0.0, 0.1, 0.1, 0.2]).__next__))
    assert killed == ["scheduler", "engine"] and kills.struck == [0.1, 0.2]
