"""A ModelRunner without a model: the next token is a hash of the context in its pages.

A model can hide a missing token, for example in a repeating text; a hash cannot. It starts in a
second, so that a run has time for hundreds of faults.
"""

import mmap
import os
import time
from collections.abc import Sequence

import numpy as np

from fake_runner import FakeExecutor
from fake_stream import Mirror
from rayfin.actors import failpoints
from rayfin.actors.adapters.part import AdapterFacts
from rayfin.actors.config import (
    BatchLimits,
    EngineArgs,
    EngineConfig,
    ModelFacts,
    resolve_limits,
    resolve_model_len,
)
from rayfin.actors.errors import EngineUnavailable, Fenced, NumericalError, RequestFailed
from rayfin.actors.messages import NO_TOKEN, Int32Array, NewRequest, SchedulerInfo, StepResult
from rayfin.actors.parts import Need
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.settings.lora_limits import loras_in_step
from rayfin.actors.weights.version import Vote, WeightVersion

FIRST, VOCAB_SIZE = 259, 2048  # the demo model's vocabulary without bytes and control tokens
STEP_SECONDS = float(os.environ.get("CHAOS_STEP_SECONDS", "0.01"))
MODEL_LEN = 8192
PAGE_BYTES = 1024
ACTIVATION_BYTES = 2**20


class PatientExecutor(FakeExecutor):
    """The scheduler tests' fake, which also checks a request's history against its pages."""

    def _next(self, mirror: Mirror, context: Int32Array) -> int:
        if mirror.new.sampling.penalises and not history_is_right(mirror.new, context):
            return FIRST  # a wrong token, which the oracle detects
        return FIRST + super()._next(mirror, context) % (self.config.vocab_size - FIRST)


def history_is_right(new: NewRequest, context: Int32Array) -> bool:
    """Whether the history for penalties is the computed context, split at the prompt's end."""
    if new.history is None:
        return False
    known = min(len(new.history), len(context))
    return bool(0 < new.prompt_len <= len(new.history)) and np.array_equal(
        new.history[:known], context[:known]
    )


def planted(info: SchedulerInfo) -> dict[int, RequestFailed]:
    """Hits the failpoint ``runner.row`` for each row and returns the rows that fail, as the real
    runner does."""
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


def allocate_activations() -> None:
    """Allocates memory from the system, as a model does for activations, so that limits apply.

    An allocator might reuse memory that it kept.
    """
    try:
        mmap.mmap(-1, ACTIVATION_BYTES).close()
    except OSError as error:
        raise MemoryError(str(error)) from error


class ModelRunner:
    """Replaces actors/runner/model_runner.py's ModelRunner, with the same interface."""

    model_len = MODEL_LEN

    def __init__(
        self,
        args: EngineArgs,
        place: None = None,
        plugins: object = None,
        version: WeightVersion | None = None,
    ) -> None:
        self._args = args
        self._version = version or WeightVersion()
        self._executor: FakeExecutor | None = None

    def profile(self) -> tuple[ModelFacts, BatchLimits]:
        args = self._args
        limits = resolve_limits(args, "cpu", resolve_model_len(args, self.model_len))
        facts = ModelFacts(
            architecture="Hash",
            vocab_size=VOCAB_SIZE,
            max_position=self.model_len,
            page_bytes=PAGE_BYTES,
            available_bytes=args.kv_cache_memory or 1024 * PAGE_BYTES,
            parts=(AdapterFacts(at_once=loras_in_step(args, "cpu")),)
            if args.serves_adapters
            else (),
        )
        return facts, limits

    def start(self, config: EngineConfig, epoch: int) -> None:
        self._executor = self.new_executor(config)
        self._executor.epoch = epoch
        self._executor.step_seconds = STEP_SECONDS
        self._executor.version = self._version.serial

    def new_executor(self, config: EngineConfig) -> FakeExecutor:
        return PatientExecutor(config)

    @property
    def next_step(self) -> tuple[int, int]:
        executor = self._executor
        return (-1, 0) if executor is None else (executor.epoch, executor._next_step)

    @property
    def args(self) -> EngineArgs:
        """The settings."""
        return self._args

    @property
    def loaded(self) -> None:
        """There is no model."""

    @property
    def cache(self) -> None:
        """Its pages are no tensors, so no file keeps them."""

    @property
    def mover(self) -> None:
        """No host memory holds its pages."""

    @property
    def states(self) -> None:
        """It keeps no state beside its pages."""

    @property
    def is_loaded(self) -> bool:
        """It can always start."""
        return True

    def drop(self) -> None:
        """There is no model to free."""

    @property
    def names(self) -> PageNames:
        """Of its pages; none before it has started."""
        return PageNames() if self._executor is None else self._executor.names

    def overwritten(self, pages: Int32Array) -> None:
        """No file is read into its pages."""

    def vote(self, version: WeightVersion) -> Vote:
        """Any tensors fit."""
        return Vote(in_place=True)

    def turn(self, epoch: int, version: WeightVersion) -> None:
        """The next token depends on the version."""
        self._version = version
        if self._executor is not None:
            self._executor.turn(version, in_place=True)
            self._executor.epoch = epoch

    def reload(self, version: WeightVersion) -> None:
        """What it computes depends on the version alone."""
        self._version, self._executor = version, None

    def sleep(self) -> None:
        if self._executor is not None:
            self._executor.sleep()

    def prepare(self, needs: Sequence[Need], *, at_once: bool = False) -> None:
        """Any text is a grammar, and any adapter is there."""

    def begin(self, info: SchedulerInfo) -> bool:
        """Queues no step: it computes where a CPU does."""
        return False

    def wait(self) -> None:
        """No step is queued."""

    def execute(self, info: SchedulerInfo) -> StepResult:
        executor = self._executor
        if info.epoch < self.next_step[0]:
            raise Fenced(f"step {info.epoch}.{info.step} refused")
        if executor is None or (info.epoch, info.step) != self.next_step:
            raise EngineUnavailable(f"step {info.epoch}.{info.step} refused")
        failed = planted(info)
        allocate_activations()
        result = executor.run(info)
        for row, error in failed.items():
            executor.live[int(info.ids[row])].over_since = executor.num_run
            result.errors[row] = error
            result.tokens[row] = NO_TOKEN
        for log in (executor.log, executor.left, executor.entered):
            log.clear()
        time.sleep(result.seconds)
        return result
