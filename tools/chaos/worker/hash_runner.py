"""A ModelRunner without a model: its next token is a hash of the context that its pages hold.

A model forgives much: a repeating text goes on as before with a token missing. A hash forgives
nothing. And it starts in a second, so that a run meets hundreds of faults.
"""

import mmap
import os
import time

import numpy as np

from fake_runner import FakeExecutor
from rayfin.actors import failpoints
from rayfin.actors.config import (
    BatchLimits,
    EngineArgs,
    EngineConfig,
    ModelFacts,
    resolve_limits,
    resolve_model_len,
)
from rayfin.actors.errors import EngineUnavailable, NumericalError, RequestFailed
from rayfin.actors.messages import NO_TOKEN, Int32Array, NewRequest, SchedulerInfo, StepResult

FIRST, VOCAB_SIZE = 259, 2048  # the demo model's tokenizer, without bytes and control tokens
STEP_SECONDS = float(os.environ.get("CHAOS_STEP_SECONDS", "0.01"))
MODEL_LEN = 8192
PAGE_BYTES = 1024
ACTIVATION_BYTES = 2**20


class PatientExecutor(FakeExecutor):
    """The scheduler's tests' fake, which also holds a request's history against its pages."""

    def _sample(self, info: SchedulerInfo, row: int, column: int, result: StepResult) -> None:
        super()._sample(info, row, column, result)
        mirror = self.live[int(info.ids[row])]
        if mirror.sampled is None:
            return
        token = FIRST + mirror.sampled % (self.config.vocab_size - FIRST)
        context = self._memory[mirror.pages].reshape(-1)[: mirror.num_tokens]
        if mirror.new.sampling.penalises and not history_is_right(mirror.new, context):
            token = FIRST  # a client's oracle sees that it is wrong
        mirror.sampled = result.tokens[row, column] = token


def history_is_right(new: NewRequest, context: Int32Array) -> bool:
    """What a request's penalties go by is what was computed, and is split at its prompt."""
    if new.history is None:
        return False
    known = min(len(new.history), len(context))
    return bool(0 < new.prompt_len <= len(new.history)) and np.array_equal(
        new.history[:known], context[:known]
    )


def planted(info: SchedulerInfo) -> dict[int, RequestFailed]:
    """Passes the point ``runner.row`` for each row; returns those that fail by it, alone, as the
    real runner's do (actors/runner/failed_rows.py)."""
    active = failpoints.ACTIVE
    if active is None:
        return {}
    at = {"epoch": info.epoch, "step": info.step}
    failed: dict[int, RequestFailed] = {}
    for row in range(len(info.ids)):
        try:
            if active.hit("runner.row", **at, tokens=info.chunk_prompt(row)) == "nan":
                failed[row] = NumericalError("its logits are not all numbers")
        except failpoints.InjectedFault as fault:
            failed[row] = RequestFailed(f"InjectedFault: {fault}")
    return failed


def take_memory() -> None:
    """As a model takes some for its activations: from the system, whose limits are felt.

    (An allocator may have kept what it had before.)
    """
    try:
        mmap.mmap(-1, ACTIVATION_BYTES).close()
    except OSError as error:
        raise MemoryError(str(error)) from error


class ModelRunner:
    """In place of the ModelRunner of actors/runner/model_runner.py, with its life and its doors."""

    def __init__(self, args: EngineArgs, place: None = None) -> None:
        self._args = args
        self._executor: FakeExecutor | None = None

    def profile(self) -> tuple[ModelFacts, BatchLimits]:
        args = self._args
        limits = resolve_limits(args, "cpu", resolve_model_len(args, MODEL_LEN))
        facts = ModelFacts(
            architecture="Hash",
            vocab_size=VOCAB_SIZE,
            max_position=MODEL_LEN,
            page_bytes=PAGE_BYTES,
            available_bytes=args.kv_cache_memory or 1024 * PAGE_BYTES,
        )
        return facts, limits

    def start(self, config: EngineConfig, epoch: int) -> None:
        self._executor = PatientExecutor(config)
        self._executor.epoch = epoch
        self._executor.step_seconds = STEP_SECONDS

    def execute(self, info: SchedulerInfo) -> StepResult:
        executor = self._executor
        if executor is None or (info.epoch, info.step) != (executor.epoch, executor._next_step):
            raise EngineUnavailable(f"step {info.epoch}.{info.step} refused")
        failed = planted(info)
        take_memory()
        result = executor.run(info)
        for row, error in failed.items():
            executor.live[int(info.ids[row])].over_since = executor.num_run
            result.errors[row] = error
            result.tokens[row] = NO_TOKEN
        for log in (executor.log, executor.left, executor.entered):
            log.clear()
        time.sleep(result.seconds)
        return result
