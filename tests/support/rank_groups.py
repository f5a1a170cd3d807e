"""Groups of runners whose ranks are threads of this process, with real Gloo between them."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from rayfin.actors.config import EngineArgs, resolve
from rayfin.actors.messages import EngineRequest, SchedulerInfo, StepResult
from rayfin.actors.parts import Need
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.parallel.groups import open_store
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.scheduler.engine import Engine

HOST = "127.0.0.1"


@dataclass
class _Step:
    """A step on all ranks."""

    answers: list["Future[StepResult]"]
    answering: int

    def result(self) -> StepResult:
        return self.answers[self.answering].result(60)


class _Prepared:
    """Grammars that all ranks have compiled."""

    def done(self) -> bool:
        return True

    def error(self) -> str | None:
        return None


class Group:
    """The ranks of an engine as threads of this process, behind the executor's interface."""

    def __init__(
        self, args: EngineArgs, tensor: int, stages: int, num_pages: int | None = None
    ) -> None:
        self.args = args
        self.sizes = (tensor, stages)
        ranks = range(tensor * stages)
        self.epoch = 0
        self.store = open_store()
        self.threads = [ThreadPoolExecutor(1) for _ in ranks]
        self.steps: list[SchedulerInfo] = []
        try:
            self.runners: list[ModelRunner] = self._all(self._load, ranks)
            facts = self._all(ModelRunner.profile, self.runners)
            scarcest = min(facts, key=lambda own: own[0].available_bytes // own[0].page_bytes)
            config = resolve(args, *scarcest)
            pages = num_pages or config.num_pages
            # These threads are no executor that has peers.
            self.config = replace(
                config, num_pages=pages, steps_in_flight=stages + 1, kv_peers=False
            )
            self.restart()
        except BaseException:
            self.close()
            raise

    def submit(self, info: SchedulerInfo) -> _Step:
        self.steps.append(info)
        calls = zip(self.threads, self.runners, strict=True)
        answers = [thread.submit(runner.execute, info) for thread, runner in calls]
        tensor, stages = self.sizes
        return _Step(answers, tensor * (stages - 1))

    def prepare(self, needs: Sequence[Need]) -> _Prepared:
        self._all(lambda runner: runner.prepare(needs), self.runners)
        return _Prepared()

    def restart(self) -> None:
        self.epoch += 1
        self._all(lambda runner: runner.start(self.config, self.epoch), self.runners)

    def sleep(self, *, deep: bool = False) -> None:
        self._all(ModelRunner.drop if deep else ModelRunner.sleep, self.runners)

    def load(self) -> None:
        """None of its runners is dropped."""

    def wake(self) -> None:
        self.restart()

    def record(self, rows: list[torch.Tensor]) -> None:
        """Appends the logits [S, V] of each step of the rank that answers, from now on."""
        tensor, stages = self.sizes
        model: Any = self.runners[tensor * (stages - 1)]._model
        forward = type(model).forward

        def recorded(*inputs: Any) -> torch.Tensor:
            rows.append(forward(model, *inputs).clone())
            return rows[-1]

        model.forward = recorded

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown(wait=False)

    def _load(self, rank: int) -> ModelRunner:
        return ModelRunner(
            self.args, ParallelRank(rank, *self.sizes, (HOST, self.store.port), HOST)
        )

    def _all(self, call: Callable[[Any], Any], of: Sequence[Any]) -> list[Any]:
        pairs = zip(self.threads, of, strict=True)
        answers = [thread.submit(call, own) for thread, own in pairs]
        return [answer.result(60) for answer in answers]


def run_group(
    group: Group, requests: Sequence[EngineRequest], stagger: int = 0, fast: bool = False
) -> Any:
    """Tokens and log probabilities of all requests by key, and the engine."""
    engine = Engine(group.config, group)
    if fast:  # as long a lease as may be, however long steps take
        engine._multi_step.observe(1e-6, 1)
        engine._multi_step.observe = lambda *_, **__: None  # type: ignore[method-assign]
    tokens: dict[int, list[int]] = {request.key: [] for request in requests}
    logprobs: dict[int, list[float]] = {request.key: [] for request in requests}
    waiting, countdown = list(requests), 0
    while waiting or engine.has_work:
        while waiting and countdown <= 0:
            engine.add(waiting.pop(0))
            countdown = stagger
        countdown -= 1
        for deltas in engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
            if deltas.logprobs is not None:
                for at, entry in deltas.logprobs.entries():
                    logprobs[int(deltas.keys[at])].append(entry.logprob)
            assert not [ended.error for ended in deltas.ended if ended.error]
    engine.check_integrity()
    return tokens, logprobs, engine
