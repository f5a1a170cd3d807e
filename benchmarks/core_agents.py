"""Sessions of agents on the real scheduler in virtual time: the policy without a model.

    python benchmarks/core_agents.py --shape h200 --pressure 1 1.5 2 --seeds 3

Prints seconds of a session with ``--sessions off`` (least recently used pages), and with ``on`` as
shares of those. The formula of a step's time has attention: late tokens of a prompt are dear.
Pressure is what all open contexts take, at their mean, by the pages there are.

``--chats N``: N people chat beside the agents; their p95 is of whole answers. ``--small N``: the
first N agents are a tenant, the others another one; then ``fcfs`` stands beside ``fair``.
``--shape life --sessions 5``: 10,000 sessions of which 2,000 are open, for the scheduler's time.
"""

import argparse
import itertools
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
from core_clock import StepTime, Visit, make_config, random_tokens, run

from rayfin.actors.messages import SchedulerInfo, SessionRef
from rayfin.deployments.bench.agents import (
    PAUSES,
    PROFILES,
    AgentFigures,
    AgentLoad,
    AgentPlan,
    AgentSession,
    AgentTurn,
    agent_figures,
)


@dataclass(frozen=True, slots=True)
class AttentionTime(StepTime):
    """Beside the rest, each pair of a token computed in a prompt and one before it."""

    pair: float = 0.0

    def of(self, info: SchedulerInfo) -> float:
        lengths = info.chunk_len[info.decoding_batch :].astype(np.float64)
        before = info.kv_len[info.decoding_batch :] + lengths / 2
        return StepTime.of(self, info) + self.pair * float(np.dot(lengths, before))


@dataclass(frozen=True, slots=True)
class Shape:
    """A model on a machine, and agents that it is made for. Tokens are scaled, seconds are not."""

    profile: str
    agents: int
    scale: float
    page_size: int
    time: AttentionTime  # unscaled
    max_batch_tokens: int  # unscaled

    def scaled_time(self) -> AttentionTime:
        """What a step takes whose tokens stand for several."""
        each, scale = self.time, 1 / self.scale
        return AttentionTime(
            each.step * scale, each.token * scale, each.kv_token * scale, 0.0, each.pair * scale**2
        )


SHAPES = {
    # Llama-3.1-8B on one H200: 50,000 prompt tokens a second at first, 13,000 at 142k of context.
    "h200": Shape("agentx", 16, 1 / 16, 16, AttentionTime(4e-3, 20e-6, 0.03e-6, 0.0, 0.6e-9), 8192),
    # Qwen3-0.6B on two cores.
    "cores": Shape("small", 10, 1 / 2, 8, AttentionTime(70e-3, 5e-3, 4e-6, 0.0, 1e-6), 512),
    # A server's life: 2,000 sessions are open at once.
    "life": Shape("small", 2000, 1 / 8, 16, AttentionTime(4e-3, 20e-6, 0.03e-6, 0.0, 0.6e-9), 8192),
}


MAX_RUNNING = 256


CHAT_PROMPT, CHAT_OUTPUT, CHAT_PAUSE = 400, 80, 20.0
"""Tokens, unscaled, of a chat's one turn, and mean seconds until the same person's next one."""


def visit_of(turn: AgentTurn, tokens: np.random.Generator, *, named: bool, small: int = 0) -> Visit:
    """The request of a turn: its session's context so far, and new tokens.

    Args:
        small: how many agents are of the first tenant.
    """
    session, parent = turn.session, turn.session.parent
    added = random_tokens(tokens, turn.added)
    whole = added if session.content is None else np.concatenate([session.content, added])
    session.content = whole
    name = SessionRef(session.name, parent="" if parent is None else parent.name)
    return Visit(turn.at, whole, turn.output, name if named else None, tenant_of(session, small))


def tenant_of(session: AgentSession, small: int) -> str:
    """The tenant of a session's agent."""
    return "small" if int(session.name.split("-")[1]) < small else ""


def measure(
    shape: Shape,
    pressure: float,
    *,
    sessions: bool,
    seed: int,
    options: argparse.Namespace,
    policy: Literal["fcfs", "fair"] = "fcfs",
) -> tuple[AgentFigures, dict[str, float]]:
    """One run; its figures, and p95 of chats, and mean seconds of the small tenant's sessions."""
    profile = PROFILES[shape.profile]
    plan = AgentPlan(
        profile=profile,
        agents=shape.agents,
        sessions=options.sessions,
        pauses=PAUSES[options.pauses],
        scale=shape.scale,
        seed=seed,
    )
    load, turns = AgentLoad(plan), dict[int, AgentTurn]()
    tokens = np.random.default_rng(seed)

    def visit(turn: AgentTurn) -> Visit:
        named, small = not options.nameless, options.small
        each = visit_of(turn, tokens, named=named, small=small)
        turns[id(each)] = turn
        return each

    def chat(now: float) -> Visit:
        at = now + tokens.exponential(CHAT_PAUSE)
        prompt = random_tokens(tokens, max(1, int(CHAT_PROMPT * shape.scale)))
        return Visit(at, prompt, max(1, int(CHAT_OUTPUT * shape.scale)))

    def answered(each: Visit) -> list[Visit]:
        if id(each) not in turns:
            going = any(session.ended is None for session in load.sessions)
            return [chat(each.times[-1])] if going else []
        turn = turns[id(each)]
        turn.session.content = np.append(each.prompt, np.full(turn.output, 7, np.int32))
        return [visit(another) for another in load.answered(turn, each.times[-1])]

    grown = profile.appended * np.exp(profile.spread**2 / 2) + profile.output
    context = shape.scale * (profile.first + grown * profile.turns / 2)
    longest = int(shape.scale * (profile.first * 1.2 + 1.4 * profile.turns * grown * 2)) + 64
    pages = int(shape.agents * context / pressure / shape.page_size)
    config = make_config(
        max_batch_tokens=max(64, int(shape.max_batch_tokens * shape.scale)),
        max_decoding_batch=min(MAX_RUNNING, shape.agents * 4),
        max_model_len=longest,
        num_pages=max(pages, longest // shape.page_size + 2),
        sessions=sessions,
    )
    outcome = run(
        replace(config, page_size=shape.page_size, policy=policy),
        [*map(visit, load.start()), *(chat(0.0) for _ in range(options.chats))],
        time=shape.scaled_time(),
        then=answered,
    )
    asked = [each for each in outcome.visits if id(each) in turns]
    waits = [(turns[id(each)].session.asked == 1, each.ttft) for each in asked]
    cached = sum(each.cached_tokens for each in asked)
    prompts = sum(len(each.prompt) for each in asked)
    beside = {"step_us": 1e6 * outcome.step_seconds}
    if chats := sorted(each.latency for each in outcome.visits if id(each) not in turns):
        beside["chats_p95"] = chats[int(0.95 * len(chats))]
    if its := [
        session.ended - session.started
        for session in load.sessions
        if session.ended is not None and tenant_of(session, options.small)
    ]:
        beside["small_mean"] = statistics.fmean(its)
    return agent_figures(load, waits, cached / prompts, outcome.seconds), beside


def compare(shape: Shape, pressure: float, options: argparse.Namespace) -> str:
    """A row of the table: off in seconds, on as shares; with two tenants fcfs, and fair."""
    runs: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for seed, on in itertools.product(range(options.seeds), (False, True)):
        two = options.small > 0
        figures, beside = measure(
            shape,
            pressure,
            sessions=on or two,
            seed=seed,
            options=options,
            policy="fair" if on and two else "fcfs",
        )
        runs[on].append(asdict(figures) | beside)
    cells = [f"{pressure:4.1f}x"]
    shown = ("mean", "p95", "longest_wait", "cached", "seconds", "step_us")
    shown += ("chats_p95", "small_mean")
    for name in (name for name in shown if name in runs[True][0]):
        off, on_ = (statistics.fmean(run[name] for run in runs[on]) for on in (False, True))
        cells.append(f"{name} {off:.2f} -> {on_:.2f} ({on_ / max(off, 1e-9):.3f})")
    return " | ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="h200")
    parser.add_argument("--pressure", type=float, nargs="+", default=[1.0, 1.5, 2.0])
    parser.add_argument("--pauses", choices=PAUSES, default="mixed")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--sessions", type=int, default=3, help="of each agent")
    parser.add_argument("--chats", type=int, default=0, help="people who chat beside the agents")
    parser.add_argument("--small", type=int, default=0, help="agents of a tenant of their own")
    parser.add_argument("--nameless", action="store_true", help="requests name no session")
    options = parser.parse_args()
    for pressure in options.pressure:
        print(compare(SHAPES[options.shape], pressure, options), flush=True)


if __name__ == "__main__":
    main()
