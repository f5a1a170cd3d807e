"""Agents in a closed loop: each runs one session after another, of turns with pauses between them.

    turn ──answer──► tools run, or a person reads (pause) ──► turn, with all before it in its prompt
              └─► subagents: sessions of their own; the next turn waits for all of them

``AgentLoad`` is this plan as a state machine, without a server and a clock: its driver says when a
turn is answered, and gets the turns that follow. So it loads a server, or a scheduler in virtual
time.
"""

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from typing import TYPE_CHECKING, Any

import httpx

from rayfin.actors.errors import InvalidConfig, ServerError
from rayfin.deployments.bench.endpoint import chat_body, stream_pieces

if TYPE_CHECKING:
    from rayfin.deployments.bench.kills import Kills

Draw = Callable[[random.Random], float]
"""Draws seconds."""


def lognormal(median: float, spread: float) -> Draw:
    """Seconds with this median; ``spread`` is the sigma of their logarithm."""
    return lambda rng: rng.lognormvariate(log(median), spread)


def mixed(share: float, often: Draw, seldom: Draw) -> Draw:
    """``often`` with a probability of ``share``, else ``seldom``."""
    return lambda rng: (often if rng.random() < share else seldom)(rng)


TOOLS, PEOPLE = lognormal(4.0, 1.2), lognormal(60.0, 1.2)
PAUSES: dict[str, Draw] = {
    "mixed": mixed(0.8, TOOLS, PEOPLE),
    "tools": TOOLS,
    "slow": lambda _: 120.0,
    "two": mixed(0.7, lambda _: 1.0, lambda _: 150.0),
    "human": mixed(0.5, TOOLS, PEOPLE),
    "quick": lambda _: 1.0,
}
"""Laws of the time between an answer and the next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentProfile:
    """How long sessions of one kind are, in tokens and turns; means, unless said otherwise."""

    turns: float
    first: int  # tokens of the first prompt
    appended: int  # median of the tokens that a turn adds beside the answer before it
    spread: float  # sigma of their logarithm
    output: int
    subagents: float = 0.0  # share of turns that start one or two
    subagent_turns: float = 5.0


PROFILES = {
    # AgentX and TraceLab: 43 turns, 142k tokens in and 444 out in each; subagents in 44 %
    "agentx": AgentProfile(turns=40, first=20_000, appended=3500, spread=0.9, output=444),
    "agentx-tree": AgentProfile(
        turns=40, first=20_000, appended=3500, spread=0.9, output=444, subagents=0.015
    ),
    # The same as two cores can bear it
    "small": AgentProfile(turns=13, first=900, appended=280, spread=0.7, output=40),
}


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """A turn of a session whose turns are known before."""

    pause: float  # seconds before it
    added: int  # tokens beside the answer before it
    output: int
    fresh: bool = False  # the context begins anew with what it adds, as after a compaction
    children: "tuple[Script, ...]" = ()  # sessions that it waits for


Script = tuple[ScriptTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """What the agents do: ``sessions`` each, one after another, drawn or as ``scripts`` in turn."""

    profile: AgentProfile
    scripts: tuple[Script, ...] = ()
    agents: int = 8
    sessions: int = 2
    pauses: Draw = PAUSES["mixed"]
    scale: float = 1.0  # of all tokens
    longest: int | None = None  # tokens of a prompt with its answer; a session ends before
    seed: int = 0


@dataclass(slots=True, eq=False)
class AgentSession:
    """One session, and what has become of it. Times are seconds of the driver's clock."""

    name: str
    turns: int
    rng: random.Random
    parent: "AgentSession | None" = None
    asked: int = 0  # turns
    tokens: int = 0  # of its context, by the plan
    children: int = 0  # that run
    started: float = 0.0
    ended: float | None = None
    alone: float = 0.0  # seconds of its pauses
    content: Any = None  # of its context, as the driver has it
    script: "Script | None" = None


@dataclass(slots=True, eq=False)
class AgentTurn:
    """A turn to ask for: what it adds to its session's context, and how long its answer is."""

    at: float
    session: AgentSession
    added: int
    output: int
    final: bool
    fresh: bool = False  # the context begins anew


@dataclass(slots=True)
class AgentLoad:
    """The agents of a plan; ``sessions`` has all that have begun, the subagents' among them."""

    plan: AgentPlan
    sessions: list[AgentSession] = field(default_factory=list)

    def start(self) -> list[AgentTurn]:
        """The first turns of all agents, spread over a pause or two."""
        agents = range(self.plan.agents)
        return [self._begin(f"{self.plan.seed}-{agent}-0", self._pause(agent)) for agent in agents]

    def answered(self, turn: AgentTurn, now: float) -> list[AgentTurn]:
        """A turn's answer is complete; returns those that follow, in any order of time."""
        session, plan = turn.session, self.plan
        session.tokens += turn.output
        if turn.final:
            session.ended = now
            return self._after(session, now)
        if session.script is not None:
            scripts = session.script[session.asked].children
            session.children = len(scripts)
            if scripts:
                return [
                    self._begin(f"{session.name}/{session.asked}.{number}", now, session, script)
                    for number, script in enumerate(scripts)
                ]
        elif session.parent is None and session.rng.random() < plan.profile.subagents:
            session.children = session.rng.choice((1, 1, 2))
            return [
                self._begin(f"{session.name}/{session.asked}.{number}", now, session)
                for number in range(session.children)
            ]
        return [self._next(session, now)]

    def _after(self, session: AgentSession, now: float) -> list[AgentTurn]:
        """What follows a session: its parent's turn, if it was the last child; or another one."""
        if (parent := session.parent) is not None:
            parent.children -= 1
            return [] if parent.children else [self._next(parent, now, pause=0.0)]
        seed, agent, number = session.name.split("-")
        if int(number) + 1 == self.plan.sessions:
            return []
        return [self._begin(f"{seed}-{agent}-{int(number) + 1}", now + self._pause(session.name))]

    def _begin(
        self,
        name: str,
        at: float,
        parent: AgentSession | None = None,
        script: Script | None = None,
    ) -> AgentTurn:
        rng, profile = random.Random(name), self.plan.profile
        if parent is None and self.plan.scripts:
            _, agent, number = name.split("-")
            place = int(agent) + self.plan.agents * int(number)
            script = self.plan.scripts[place % len(self.plan.scripts)]
        if script is not None:
            session = AgentSession(name, len(script), rng, parent, started=at, script=script)
            self.sessions.append(session)
            return self._next(session, at)
        mean = profile.turns if parent is None else profile.subagent_turns
        turns = max(1, round(mean * rng.uniform(0.6, 1.4)))
        session = AgentSession(name, turns, rng, parent, started=at)
        self.sessions.append(session)
        return self._ask(session, at, self._scaled(profile.first * rng.uniform(0.8, 1.2)))

    def _next(self, session: AgentSession, now: float, pause: float | None = None) -> AgentTurn:
        profile, rng = self.plan.profile, session.rng
        if session.script is not None:
            turn = session.script[session.asked]
            pause = turn.pause if pause is None else pause
            session.alone += pause
            return self._ask(session, now + pause, self._scaled(turn.added))
        pause = self.plan.pauses(rng) if pause is None else pause
        session.alone += pause
        added = rng.lognormvariate(log(profile.appended), profile.spread)
        return self._ask(session, now + pause, self._scaled(added))

    def _ask(self, session: AgentSession, at: float, added: int) -> AgentTurn:
        turn = None if session.script is None else session.script[session.asked]
        if turn is None:
            output = self._scaled(self.plan.profile.output * session.rng.uniform(0.5, 1.5))
        else:
            output = self._scaled(turn.output)
        if fresh := turn is not None and turn.fresh:
            session.tokens = 0
        session.asked += 1
        final = session.asked == session.turns
        if (longest := self.plan.longest) is not None:
            room = longest - session.tokens - output
            added = max(1, min(added, room))
            final = final or room - added < longest // 8
        session.tokens += added
        return AgentTurn(at, session, added, output, final, fresh)

    def _pause(self, name: object) -> float:
        return self.plan.pauses(random.Random(f"pause {self.plan.seed} {name}"))

    def _scaled(self, tokens: float) -> int:
        return max(1, round(tokens * self.plan.scale))


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """The figures of a run; seconds."""

    sessions: int
    seconds: float
    mean: float  # of a session
    p50: float
    p95: float
    alone: float  # mean of a session's pauses
    longest_wait: float  # from a turn's sending to its first token; 0: no answer had text
    later_ttft: float  # median of all turns but the first ones
    cached: float  # share of the prompts' tokens
    fairness: float  # Jain's index of the agents' speed: 1 is all alike

    def lines(self) -> list[str]:
        """Returns the figures as text, the headline first."""
        waits = "no answer had any text"
        if self.longest_wait:
            waits = f"first token of later turns: median {self.later_ttft:.2f} s"
            waits += f" · longest wait {self.longest_wait:.1f} s"
        return [
            f"session: mean {self.mean:.1f} s, p50 {self.p50:.1f} s, p95 {self.p95:.1f} s"
            f" · {self.alone:.1f} s of it pauses",
            f"{self.sessions} sessions in {self.seconds:.1f} s"
            f" · {3600 * self.sessions / max(self.seconds, 1e-9):.1f} an hour"
            f" · Jain's index {self.fairness:.3f}",
            f"{waits} · {self.cached:.1%} of prompts cached",
        ]


def agent_figures(
    load: AgentLoad, waits: list[tuple[bool, float]], cached: float, seconds: float
) -> AgentFigures:
    """The figures of the sessions that have ended.

    Args:
        waits: of each turn: whether it is a first one, and the seconds to its first token.
        cached: share of the prompts' tokens.

    Raises:
        InvalidConfig: none has ended.
    """
    ended = [
        session for session in load.sessions if session.ended is not None and session.parent is None
    ]
    if not ended:
        raise InvalidConfig("no session has ended", "sessions")
    taken = sorted(_taken(session) for session in ended)
    agents: dict[str, list[float]] = {}
    for session in ended:
        agents.setdefault(session.name.rpartition("-")[0], []).append(_taken(session))
    speeds = [1 / statistics.fmean(its) for its in agents.values()]
    later = [wait for first, wait in waits if not first]
    return AgentFigures(
        len(ended),
        seconds,
        statistics.fmean(taken),
        taken[len(taken) // 2],
        taken[min(len(taken) - 1, int(0.95 * len(taken)))],
        statistics.fmean(session.alone for session in ended),
        max((wait for _, wait in waits), default=0.0),
        statistics.median(later) if later else 0.0,
        cached,
        sum(speeds) ** 2 / (len(speeds) * sum(speed**2 for speed in speeds)),
    )


def _taken(session: AgentSession) -> float:
    assert session.ended is not None
    return session.ended - session.started


SYLLABLES = ("ba", "do", "fi", "ga", "ka", "lo", "mi", "ne", "po", "ra", "su", "ti")


@dataclass(slots=True)
class _Answer:
    """A turn's, and when it was under way."""

    session: str
    body: dict[str, Any]
    text: str
    sent: float
    ended: float


class AgentClient:
    """Drives a load at a server's chats. Turns that fail are counted, and their sessions go on.

    Args:
        kills: amid the run. Answers that were under way then are asked for again after it, of
            which a greedy one is the same.
    """

    def __init__(
        self, client: httpx.AsyncClient, model: str, load: AgentLoad, kills: "Kills | None" = None
    ) -> None:
        self.load = load
        self.errors: Counter[str] = Counter()
        self.failed: set[str] = set()  # sessions with a turn that failed, ...
        self.wrong: set[str] = set()  # ... and with an answer that is another one without a kill
        self.amid = 0  # answers that were under way at a kill
        self._kills = kills
        self._answers: list[_Answer] = []
        self._client = client
        self._model = model
        self._waits: list[tuple[bool, float]] = []
        self._cached = self._prompts = 0
        self._started = self._ended = 0.0

    async def run(self) -> None:
        """Runs all sessions to their ends."""
        self._started = time.perf_counter()
        killing = None if self._kills is None else asyncio.create_task(self._kills.run(self._now))
        async with asyncio.TaskGroup() as group:
            for turn in self.load.start():
                group.create_task(self._take(turn, group))
        self._ended = self._now()
        if self._kills is not None and killing is not None:
            if not killing.cancel():
                killing.result()
            await self._check(self._kills.struck)

    def figures(self) -> AgentFigures:
        """The figures of the run.

        Raises:
            InvalidConfig: no session has ended.
        """
        share = self._cached / max(self._prompts, 1)
        return agent_figures(self.load, self._waits, share, self._ended)

    def killed_line(self, struck: list[float]) -> str:
        """What kills at these times have cost, as text."""
        return (
            f"{len(struck)} kills, at {', '.join(f'{at:.0f}' for at in struck)} s"
            f" · {len(self.failed)} of {len(self.load.sessions)} sessions failed"
            f" · {len(self.wrong)} wrong, by {self.amid} answers asked for again"
        )

    async def _check(self, struck: list[float]) -> None:
        """Asks again for what was under way at a kill."""
        for each in self._answers:
            if not any(each.sent <= at <= each.ended for at in struck):
                continue
            self.amid += 1
            again = ""
            try:
                async for piece in stream_pieces(self._client, "/chat/completions", each.body):
                    again += piece.text
            except ServerError as error:
                self.errors[str(error)] += 1
            if again != each.text:
                self.wrong.add(each.session)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    async def _take(self, turn: AgentTurn, group: asyncio.TaskGroup) -> None:
        await asyncio.sleep(turn.at - self._now())
        session, sent = turn.session, self._now()
        messages = [] if turn.fresh else session.content or []
        messages.append({"role": "user", "content": _words(session.rng, turn.added)})
        answer, first = "", None
        asked = {"max_tokens": turn.output, "temperature": 0.0, "ignore_eos": True}
        body = chat_body(self._model, messages, asked)
        try:
            async for piece in stream_pieces(
                self._client, "/chat/completions", body, _headers(turn)
            ):
                if first is None and (piece.text or piece.reasoning):
                    first = self._now() - sent
                answer += piece.text
                self._prompts += piece.prompt_tokens or 0
                self._cached += piece.cached_tokens or 0
            if self._kills is not None:
                asked_for = body | {"messages": list(messages)}
                self._answers.append(_Answer(session.name, asked_for, answer, sent, self._now()))
        except ServerError as error:
            self.errors[str(error)] += 1
            self.failed.add(session.name)
        if first is not None:
            self._waits.append((session.asked == 1, first))
        messages.append({"role": "assistant", "content": answer or "-"})
        session.content = messages
        for another in self.load.answered(turn, self._now()):
            group.create_task(self._take(another, group))


def _headers(turn: AgentTurn) -> dict[str, str]:
    names = {"X-Session-Id": turn.session.name}
    if turn.session.parent is not None:
        names["X-Parent-Session-Id"] = turn.session.parent.name
    if turn.fresh:
        names["x-claude-code-context-compacted"] = "true"
    return names | ({"X-Session-Final": "true"} if turn.final else {})


def _words(rng: random.Random, tokens: int) -> str:
    """About ``tokens`` tokens that no other text shares."""
    words = ("".join(rng.choices(SYLLABLES, k=2)) for _ in range(max(1, tokens // 2)))
    return " ".join(words)


def run_agents(
    connection: dict[str, Any], model: str, plan: AgentPlan, kills: "Kills | None" = None
) -> AgentClient:
    """Runs a plan at a server (``client_settings``); returns the client, which has the figures."""

    async def run() -> AgentClient:
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(**connection, limits=unlimited) as client:
            agents = AgentClient(client, model, AgentLoad(plan), kills)
            await agents.run()
            return agents

    return asyncio.run(run())
