"""Runner actors: one reads pages of the other, and a new scheduler finds those of its own."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rayfin.actors.config import EngineArgs
from rayfin.actors.messages import EngineRequest, PagesAt, Sampling, StopRules
from rayfin.actors.processes.identity import Process
from rayfin.actors.processes.registry import end_process
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.scheduler.runner_group import RunnerGroup

PAGE = 16
PROMPT = [(3 + 7 * i) % 120 for i in range(8 * PAGE + 5)]
LENGTH = 12


class Scheduler:
    """An engine in this process, with its runner as an actor."""

    def __init__(self, args: EngineArgs, name: str, generation: int = 0) -> None:
        self.group = RunnerGroup(args, name, generation=generation)
        self.engine = Engine(self.group.start(), self.group)
        self.engine.lifecycle.state.tables.restore(self.group.names)
        self._key = 0

    def answer(self, prompt: list[int], pages_at: PagesAt | None = None) -> tuple[list[int], int]:
        """Its tokens, and how many of the prompt were cached."""
        self._key += 1
        stopping = StopRules(LENGTH, frozenset(), frozenset())
        request = EngineRequest("r", np.array(prompt, np.int32), Sampling(), stopping)
        request.key, request.pages_at = self._key, pages_at
        self.engine.add(request)
        tokens: list[int] = []
        while True:
            for deltas in self.engine.step().values():
                tokens += deltas.tokens.tolist()
                for ended in deltas.ended:
                    assert ended.error is None
                    return tokens, ended.cached_tokens


@pytest.fixture(scope="module")
def args(cluster: None, settings: dict[str, Any], tiny_model: Callable[[str], Any]) -> EngineArgs:
    own = {"model": str(tiny_model("qwen3").folder), "dtype": "float32", "page_size": PAGE}
    return EngineArgs(**{**settings, **own, "spare_runners": 0, "num_pages": 64})


@pytest.fixture(scope="module")
def source(args: EngineArgs) -> Iterator[Scheduler]:
    scheduler = Scheduler(args, "peers/engine/0")
    yield scheduler
    scheduler.group.close()


@pytest.fixture(scope="module")
def reader(args: EngineArgs) -> Iterator[Scheduler]:
    scheduler = Scheduler(args, "peers/engine/1")
    yield scheduler
    scheduler.group.close()


def test_a_prompt_that_another_engine_has(source: Scheduler, reader: Scheduler) -> None:
    expected, cached = source.answer(PROMPT)
    assert cached == 0
    assert reader.answer(PROMPT, PagesAt("peers/engine/0", 8)) == (expected, 8 * PAGE)
    assert reader.engine.stats().pages_read["p2p", "arrived"] == 8
    turn = [*PROMPT, *expected, 5, 6]
    assert source.answer(turn)[0] == reader.answer(turn)[0]


def test_an_engine_that_is_not_there(source: Scheduler, reader: Scheduler) -> None:
    prompt = PROMPT[::-1]
    assert reader.answer(prompt, PagesAt("peers/engine/7", 8)) == (source.answer(prompt)[0], 0)


def test_the_next_scheduler_knows_the_pages(args: EngineArgs, source: Scheduler) -> None:
    expected, _ = source.answer(PROMPT)
    after = Scheduler(args, "peers/engine/0", generation=1)
    assert after.answer([*PROMPT, *expected[:-1]])[1] >= 8 * PAGE
    source.group, source.engine = after.group, after.engine


def test_a_source_that_was_killed(source: Scheduler, reader: Scheduler) -> None:
    prompt = [token + 1 for token in PROMPT]
    expected, _ = source.answer(prompt)
    processes: list[Process] = source.group.processes
    assert all(end_process(process) for process in processes)
    assert reader.answer(prompt, PagesAt("peers/engine/0", 8)) == (expected, 0)
