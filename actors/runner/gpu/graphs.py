"""Whole decode steps as CUDA graphs; a multi-step call replays one several times.

A step from its inputs to its sampled tokens is captured once for each batch size. Between two steps
of a call nothing comes from the host. A call may be queued behind another whose tokens the host has
not read yet: its rows take them from their slots on the device. The tokens are copied while the
next call runs. Each batch size has a second graph with token rules and log probabilities, used if a
row requests them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rayfin.actors.messages import BoolArray, Int32Array, Int64Array, Logprobs, SchedulerInfo
from rayfin.actors.runner.gpu.decode_state import (
    DecodeState,
    bucket_of,
    bucket_sizes,
    max_steps_per_row,
)
from rayfin.actors.runner.gpu.graph_extras import GraphExtras, GraphLogprobs
from rayfin.actors.runner.gpu.graph_tokens import GraphTokens, SideStream
from rayfin.actors.runner.gpu.prompt_graphs import PromptGraphs, Recordable
from rayfin.actors.runner.gpu.prompt_steps import PromptSteps
from rayfin.actors.runner.parts.model_part import ModelPart
from rayfin.actors.runner.request_slots import NO_LOGPROBS, RequestSlots
from rayfin.actors.runner.sampling.device_rules import RowTokenRules
from rayfin.kernels.triton.logprobs import MAX_TOP_LOGPROBS
from rayfin.kernels.triton.sample import sample

logger = logging.getLogger(__name__)

MAX_QUEUED = 2
"""Calls on the device at once: one that computes, and one behind it."""

WARM_UPS = 2  # before capture: kernels are compiled, libraries allocate their workspace


class CudaRecorder:
    """Captures a function's work on the GPU; all graphs share one memory pool and one stream.

    Each stream keeps a cuBLAS workspace (32 MiB on Hopper). So the recorder has one stream for all
    its graphs. It is not torch's default capture stream: the end of another recorder's graph may
    free the workspace of that one, which the graphs of this recorder still read.
    """

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that replays the work."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use CUDA meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay


@dataclass(slots=True)
class QueuedCall:
    """A multi-step call that the device has been given."""

    info: SchedulerInfo
    rules: RowTokenRules | None
    num_logprobs: Int64Array | None  # [R], None if no row requests log probabilities
    tokens: GraphTokens
    begun: float  # seconds: not before it was queued, nor before the call before it has been read


@dataclass(frozen=True, slots=True)
class MultiStepOutput:
    """The result of a multi-step call."""

    tokens: Int32Array  # [num_steps, R]; -1 where a row could not be sampled
    graph_logprobs: GraphLogprobs | None

    def logprobs(self, step: int, rows: Int64Array) -> Logprobs | None:
        """Those of a step's ``rows`` [N], numbered 0 .. N - 1, or None if no row requests them."""
        if self.graph_logprobs is None:
            return None
        return self.graph_logprobs.logprobs(step, rows, self.tokens[step, rows])


class DecodeGraphs:
    """Runs decode steps as graphs; on a CPU without capture, for Triton's interpreter.

    The layers of other steps, and those of a ``draft`` model, are graphs too (`prompt_graphs`), of
    the same recorder: they share its memory, and run one at a time. So are not those of models with
    states, of which each chunk of a prompt is computed alone. Head and sampling of steps with
    prompts are graphs where no row has more than the model: adapters, images (`prompt_steps`).

    Args:
        whole: False records the layers alone, since a head has to see states between two steps.
        drafts: layers that draft have to see prompts.
    """

    def __init__(
        self,
        model: Recordable,
        slots: RequestSlots,
        *,
        rows: int,
        pages_per_request: int,
        page_size: int,
        max_num_steps: int,
        max_tokens: int,
        device: torch.device,
        draft: Recordable | None = None,
        whole: bool = True,
        drafts: bool = False,
        parts: Sequence[ModelPart] = (),
    ) -> None:
        self._model = model
        self._parts = parts
        self.whole = whole
        self._slots = slots
        self._page_size = page_size
        self._sizes = bucket_sizes(rows)
        max_rows = self._sizes[-1]
        sizes = (max_rows, pages_per_request, page_size)
        row_inputs = [row_input for part in parts for row_input in part.row_inputs]
        self._state = DecodeState(
            slots, *sizes, device, model.starts_early, row_inputs, model.states
        )
        self._extras = GraphExtras(max_rows, device)
        self._rows = torch.arange(max_rows, device=device)
        on_gpu = device.type == "cuda"
        side = SideStream(device) if on_gpu else None
        self._tokens = [
            GraphTokens(max_num_steps, max_rows, device, side) for _ in range(MAX_QUEUED)
        ]
        self.queued: deque[QueuedCall] = deque()  # not collected yet, the oldest first
        self._unread: BoolArray = np.zeros(len(slots.num_pages), np.bool_)
        """By slot: its last token has not been collected, so that only the device has it."""
        self._record = CudaRecorder() if on_gpu else _run_once
        self._replays: dict[tuple[int, bool, tuple[str, ...]], Callable[[], None]] = {}
        if whole:
            self._record_steps([row_input.name for row_input in row_inputs])
        record = self._record if on_gpu else lambda work: work
        self._layers = [
            PromptGraphs(
                each,
                record,
                max_tokens=max_tokens,
                max_rows=rows,
                pages_per_request=pages_per_request,
                page_size=page_size,
                device=device,
            )
            for each in (model, draft)
            if each is not None and each.states is None
        ]
        self._prompts: PromptSteps | None = None
        if whole and not drafts and model.states is None:
            self._prompts = PromptSteps(self._layers[0], self._state, self._extras, record)

    def _record_steps(self, names: Sequence[str]) -> None:
        """Records a step of each size, and two sizes with extras and with each row input."""
        # Compiles the kernels of extras: of many rows, and of few, which start early. Others record
        # theirs at first use. So do those that read numbers of rows.
        for size in (self._sizes[-1], self._sizes[0]):
            self._replay(size, extras=True)
            for name in names:
                self._replay(size, extras=False, names=(name,))
        for size in reversed(self._sizes):  # the largest first, whose memory the others reuse
            self._replay(size, extras=False)

    def use(self, slots: RequestSlots) -> None:
        """Runs the requests in ``slots`` from now on, and the layers of the models' other steps.

        The pages stay those that were bound when the graphs were recorded.
        """
        self._slots = slots
        for layers in self._layers:
            layers.serve()
        self._state.use(slots)
        self.queued.clear()
        self._unread[:] = False

    def close(self) -> None:
        """Frees what was recorded of the models' layers; no step may come."""
        for layers in self._layers:
            layers.model.replay = None

    def still_ends(self, slots: Sequence[int]) -> bool:
        """Returns whether rows of a queued call are in ``slots`` whose ends are looked up later.

        Until it is collected the slots' next requests, which have other ends, may not enter.
        """
        return any(
            call.info.num_steps > 1 and not set(slots).isdisjoint(call.info.ids.tolist())
            for call in self.queued
        )

    @property
    def is_full(self) -> bool:
        """Whether a call must be collected before another one is queued."""
        return len(self.queued) == MAX_QUEUED

    def supports(self, info: SchedulerInfo, rules: RowTokenRules | None) -> bool:
        """Returns whether graphs can run the step: not too many rows, and rules that they have;
        beside prompts no rules."""
        rows = len(info.ids)
        # Their slots may still tell what the requests before them ask for.
        entering = (new.sampling.logprobs or 0 for new in info.new_requests)
        if max(entering, default=0) > MAX_TOP_LOGPROBS:
            return False
        if rows > info.decoding_batch:
            return rules is None and self._supports_prompts(info)
        return (
            self.whole
            and info.num_steps <= len(self._tokens[0])
            and bucket_of(rows, self._sizes) is not None
            and bool((info.chunk_len == 1).all() and (info.last_pos >= 0).all())
            and self._extras.fits(rules)
            and not self.left_out(info.ids).any()
        )

    def _supports_prompts(self, info: SchedulerInfo) -> bool:
        altered = (part.alters(info.ids) for part in self._parts)
        return (
            self._prompts is not None
            and info.num_steps == 1
            and not self.left_out(info.ids).any()
            and not any(mask is not None and mask.any() for mask in altered)
            and self._slots.scored.keys().isdisjoint(info.ids.tolist())
            and self._prompts.holds(info)
        )

    def left_out(self, ids: Int32Array) -> BoolArray:
        """Which of the slots [R] ask for log probabilities that graphs do not give, or whose part
        of a model they do not have."""
        left: BoolArray = self._slots.logprobs[ids] > MAX_TOP_LOGPROBS
        named = self._slots.logprob_ids
        if named:
            left |= np.isin(ids, list(named))
        for part in self._parts:
            if (of_part := part.left_out(ids)) is not None:
                left |= of_part
        return left

    @torch.inference_mode()
    def begin(self, info: SchedulerInfo, rules: RowTokenRules | None) -> None:
        """Queues the steps of a call on the device, for ``collect``.

        Behind a queued call only one without rules may come: they need tokens that the host does
        not know.
        """
        assert not self.is_full
        taken = [call.tokens for call in self.queued]
        tokens = next(each for each in self._tokens if each not in taken)
        sampling = info.last_pos >= 0
        asked = np.where(sampling, self._slots.logprobs[info.ids], NO_LOGPROBS)
        num_logprobs = asked if (asked != NO_LOGPROBS).any() else None
        if len(info.ids) > info.decoding_batch:
            assert self._prompts is not None and rules is None
            unread = self._unread
            outputs = self._prompts.run(info, self._slots, unread, num_logprobs)
            tokens.store(0, *outputs)
        else:
            self._decode(info, rules, num_logprobs, tokens)
        tokens.send(info.num_steps, logprobs=num_logprobs is not None)
        self.queued.append(QueuedCall(info, rules, num_logprobs, tokens, time.perf_counter()))
        self._unread[info.ids] = True

    def _decode(
        self,
        info: SchedulerInfo,
        rules: RowTokenRules | None,
        num_logprobs: Int64Array | None,
        tokens: GraphTokens,
    ) -> None:
        """Queues decode steps, of which ``num_logprobs`` [R] log probabilities are asked for."""
        bucket = bucket_of(len(info.ids), self._sizes)
        assert bucket is not None and not (rules is not None and self.queued)
        extras = num_logprobs is not None or rules is not None
        numbers = self._state.numbers_of(info.ids)
        # Before the load: to record runs the step.
        replay = self._replay(bucket, extras, tuple(numbers))
        steps = max_steps_per_row(info, self._slots, self._page_size)
        self._state.load(info, steps, bucket, self._unread[info.ids])
        self._state.load_numbers(numbers, bucket)
        if extras:
            asked = self._slots.logprobs[info.ids] if num_logprobs is None else num_logprobs
            self._extras.load(rules, asked, bucket)
        logprobs = [] if num_logprobs is None else self._extras.outputs(bucket)
        for step in range(info.num_steps):
            replay()
            tokens.store(step, self._state.sampled[:bucket], *logprobs)

    @torch.inference_mode()
    def collect(self) -> MultiStepOutput | None:
        """Waits for the oldest queued call and returns what it sampled.

        Tokens after a row's end (a stop token or its cap) are undefined. Returns None if a row
        could not be sampled and a rule may be the reason; running step by step then finds it.
        """
        call = self.queued.popleft()
        info = call.info
        tokens = call.tokens.collect(info.num_steps, len(info.ids))  # the only wait for the device
        self._unread[info.ids] = False
        for later in self.queued:
            self._unread[later.info.ids] = True
            later.begun = max(later.begun, time.perf_counter())
        if call.rules is not None and (tokens < 0).any():
            return None
        logprobs = None
        if call.num_logprobs is not None:
            logprobs = call.tokens.logprobs(info.num_steps, call.num_logprobs)
        return MultiStepOutput(tokens, logprobs)

    def _replay(self, bucket: int, extras: bool, names: tuple[str, ...] = ()) -> Callable[[], None]:
        """The recorded step, which is recorded at its first use."""
        key = (bucket, extras, names)
        if key not in self._replays:
            self._state.empty(bucket)  # rows of the call before may not be among the bucket's
            self._replays[key] = self._record(self._step(bucket, extras, names))
        return self._replays[key]

    def _step(self, bucket: int, extras: bool, names: tuple[str, ...] = ()) -> Callable[[], None]:
        state, rows = self._state, self._rows[:bucket]
        batch, sampling = state.batch(bucket, names), state.sampling(bucket)
        early = self._model.starts_early(bucket)

        @torch.inference_mode()
        def step() -> None:
            state.prepare(bucket)
            logits = self._model.logits(self._model.stream(state.tokens[:bucket], batch), rows)
            changed = self._extras.adjust(logits, state.drawn[:bucket]) if extras else logits
            sample(changed, sampling, out=state.sampled[:bucket], pdl=early)
            if extras:
                sampled, remaining = state.sampled[:bucket], state.remaining[:bucket]
                self._extras.record_logprobs(logits, sampled, remaining)
            state.finish(bucket)

        return step


def _run_once(work: Callable[[], None]) -> Callable[[], None]:
    work()  # as capture does, so that all launches exist
    return work
