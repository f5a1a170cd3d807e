"""Rayfin's and vLLM's scheduler under the same cases, without a model.

A case is a plain dict, so that it can be sent to vLLM's environment as JSON (``core_vllm.py``).
Both answer with seconds: of each steady step, or of each ``add`` and ``abort``. A step's are CPU
time of its thread, so that a busy machine does not count against the longer one.
"""

import gc
import json
import random
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from core_clock import StepTime, StubExecutor, make_config, make_request

from rayfin.actors.messages import SchedulerInfo, StepResult
from rayfin.actors.scheduler.engine import Engine

WARM_STEPS = 32
BATCH_TOKENS = 8192
MODEL_LEN = 4096
PEER = Path(__file__).with_name("core_vllm.py")

Case = dict[str, Any]
Seconds = dict[str, list[float]]


def steps_case(
    running: int,
    *,
    steps: int = 300,
    waiting: int = 0,
    in_flight: int = 2,
    prefix_caching: bool = True,
    churn: bool = False,
) -> Case:
    """Steady steps of ``running`` decoding requests, their pages not full at the same time.

    Args:
        waiting: requests in the queue behind them.
        churn: outputs are short (33 to 96 tokens), so that requests end and others come in all
            along; then ``waiting`` must be enough of them.
    """
    count = running + waiting
    return {
        "kind": "steps",
        "running": running,
        "max_running": running,
        "num_pages": running * (116 + 2 * (steps + WARM_STEPS + 64)) // 16 + 64,
        "prefix_caching": prefix_caching,
        "in_flight": in_flight,
        "steps": steps,
        "churn": churn,
        "prompts": [prompt(name) for name in range(count)],
        "outputs": [33 + name * 37 % 64 if churn else 2000 for name in range(count)],
    }


def queue_case(queued: int, *, calls: int = 500) -> Case:
    """``calls`` more requests join ``queued`` waiting ones; then as many are aborted at random."""
    return {
        "kind": "queue",
        "queued": queued,
        "calls": calls,
        "max_running": 256,
        "num_pages": 1000,
        "prefix_caching": True,
        "in_flight": 2,
        "prompts": [prompt(name) for name in range(calls)],
    }


def prompt(name: int) -> list[int]:
    """A prompt of 100 to 115 tokens without a common prefix."""
    return [
        3 + name // 900,
        3 + name % 900,
        *((name + 7 * i) % 900 + 3 for i in range(98 + name % 16)),
    ]


class Subject(Protocol):
    """A scheduler to measure."""

    def ask(self, case: Case) -> Seconds: ...


class _TimedStub(StubExecutor):
    """Measures its own time, which is a runner's and not the scheduler's."""

    def __init__(self) -> None:
        super().__init__(StepTime(0.0, 0.0, 0.0, 0.0))
        self.seconds = 0.0

    def run(self, info: SchedulerInfo) -> StepResult:
        started = time.thread_time()
        result = super().run(info)
        self.seconds += time.thread_time() - started
        return result


class Rayfin:
    """Rayfin's engine: a step schedules, builds the SchedulerInfo, applies the result, delivers."""

    def ask(self, case: Case) -> Seconds:
        return _steps(case) if case["kind"] == "steps" else _queue(case)


def _engine(case: Case, executor: StubExecutor) -> Engine:
    rows = case["max_running"]
    return Engine(
        make_config(
            max_batch_tokens=BATCH_TOKENS,
            max_decoding_batch=rows,
            max_prefill_batch=rows,
            max_model_len=MODEL_LEN,
            num_pages=case["num_pages"],
            prefix_caching=case["prefix_caching"],
            steps_in_flight=case["in_flight"],
        ),
        executor,
    )


def _steps(case: Case) -> Seconds:
    executor = _TimedStub()
    engine = _engine(case, executor)
    for name, (tokens, output) in enumerate(zip(case["prompts"], case["outputs"], strict=True)):
        engine.add(make_request(name, np.array(tokens, np.int32), output))
    running = engine.lifecycle.state.running
    while len(running) < case["running"] or (running.prefilling and not case["churn"]):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    gc.freeze()  # as vLLM's engine core does
    times = []
    for _ in range(case["steps"]):
        before, started = executor.seconds, time.thread_time()
        engine.step()
        times.append(time.thread_time() - started - (executor.seconds - before))
    gc.unfreeze()
    assert case["churn"] or len(running) == case["running"]
    return {"step": times}


def _queue(case: Case) -> Seconds:
    engine = _engine(case, StubExecutor(StepTime(0.0, 0.0, 0.0, 0.0)))
    queued, calls = case["queued"], case["calls"]
    prompts = [np.array(tokens, np.int32) for tokens in case["prompts"]]
    requests = [make_request(n, prompts[n % len(prompts)], 100) for n in range(queued + calls)]
    for request in requests[:queued]:
        engine.add(request)
    gc.freeze()
    adds = [_timed(engine.add, request) for request in requests[queued:]]
    names = random.Random(0).sample(range(queued + calls), calls)
    aborts = [_timed(engine.abort, "", name) for name in names]
    gc.unfreeze()
    assert len(engine.lifecycle.state.waiting) == queued
    return {"add": adds, "abort": aborts}


def _timed(call: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


class Vllm:
    """vLLM's scheduler, in a process of its environment, as a context manager.

    Args:
        python: the interpreter of an environment with vLLM in it.

    Raises:
        RuntimeError: vLLM cannot be started there.
    """

    def __init__(self, python: str) -> None:
        self._command = [python, str(PEER)]
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self.version: str = self._answer()["version"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Vllm":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def ask(self, case: Case) -> Seconds:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if case["kind"] == "steps":
            both = zip(answer["schedule"], answer["update"], strict=True)
            answer["step"] = [schedule + update for schedule, update in both]
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"no answer from `{' '.join(self._command)}`; see what it says")
        answer: dict[str, Any] = json.loads(line)
        return answer
