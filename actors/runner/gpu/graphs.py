"""Whole decode steps as CUDA graphs; a multi-step call replays one several times.

A step from its inputs to its sampled tokens is captured once for each batch size. Between two steps
of a call nothing comes from the host, and the sampled tokens are copied while the next step runs.
Each batch size has a second graph with token rules and log probabilities, used if a row requests
them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rayfin.actors.messages import Int32Array, Int64Array, Logprobs, SchedulerInfo
from rayfin.actors.runner.gpu.decode_state import (
    DecodeState,
    bucket_of,
    bucket_sizes,
    max_steps_per_row,
)
from rayfin.actors.runner.gpu.decoder import GpuDecoder
from rayfin.actors.runner.gpu.graph_extras import GraphExtras, GraphLogprobs
from rayfin.actors.runner.gpu.graph_tokens import GraphTokens, SideStream
from rayfin.actors.runner.sampling.processors.device_rules import RowTokenRules
from rayfin.actors.runner.step.batch import StepInputs
from rayfin.actors.runner.step.request_slots import NO_LOGPROBS, RequestSlots
from rayfin.kernels.triton.sample import sample

logger = logging.getLogger(__name__)

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
    """Runs decode steps as graphs; on a CPU without capture, for Triton's interpreter."""

    def __init__(
        self,
        model: GpuDecoder,
        slots: RequestSlots,
        *,
        rows: int,
        pages_per_request: int,
        page_size: int,
        max_num_steps: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._slots = slots
        self._page_size = page_size
        self._sizes = bucket_sizes(rows)
        max_rows = self._sizes[-1]
        self._state = DecodeState(slots, max_rows, pages_per_request, page_size, device)
        self._extras = GraphExtras(max_rows, max_num_steps, device)
        self._rows = torch.arange(max_rows, device=device)
        on_gpu = device.type == "cuda"
        side = SideStream(device) if on_gpu else None
        self._tokens = GraphTokens(max_num_steps, max_rows, device, side)
        self._record = CudaRecorder() if on_gpu else _run_once
        self._replays: dict[tuple[int, bool], Callable[[], None]] = {}
        self._replay(max_rows, extras=True)  # compiles its kernels; smaller ones at first use
        for size in reversed(self._sizes):  # the largest first, whose memory the others reuse
            self._replay(size, extras=False)

    def use(self, slots: RequestSlots) -> None:
        """Runs the requests in ``slots`` from now on, on the same pages as before."""
        self._slots = slots
        self._state.use(slots)

    def supports(self, info: SchedulerInfo, rules: RowTokenRules | None) -> bool:
        """Whether a graph can run the step: decode rows only, not too many, supported rules."""
        rows = len(info.ids)
        return (
            rows == info.decoding_batch
            and info.num_steps <= len(self._tokens)
            and bucket_of(rows, self._sizes) is not None
            and bool((info.chunk_len == 1).all() and (info.last_pos >= 0).all())
            and self._extras.fits(rules, self._slots.logprobs[info.ids])
            and not self._slots.name_tokens(info.ids)
        )

    @torch.inference_mode()
    def run(self, info: SchedulerInfo, rules: RowTokenRules | None) -> MultiStepOutput | None:
        """Runs the steps of a multi-step call.

        Tokens after a row's end (a stop token or its cap) are undefined. Returns None if a row
        could not be sampled and a rule may be the reason; running step by step then finds it.
        """
        rows = len(info.ids)
        bucket = bucket_of(rows, self._sizes)
        assert bucket is not None
        num_logprobs = self._slots.logprobs[info.ids]
        any_logprobs = bool((num_logprobs != NO_LOGPROBS).any())
        extras = any_logprobs or rules is not None
        replay = self._replay(bucket, extras)  # before the load: to record runs the step
        self._state.load(info, max_steps_per_row(info, self._slots, self._page_size), bucket)
        if extras:
            self._extras.load(rules, num_logprobs, bucket)
        for step in range(info.num_steps):
            replay()
            self._tokens.store(step, self._state.sampled[:bucket])
            if any_logprobs:
                self._extras.store(step)
        tokens = self._tokens.collect(info.num_steps, rows)  # the only wait for the device
        if rules is not None and (tokens < 0).any():
            return None
        graph_logprobs = (
            self._extras.collect(info.num_steps, num_logprobs) if any_logprobs else None
        )
        return MultiStepOutput(tokens, graph_logprobs)

    def _replay(self, bucket: int, extras: bool) -> Callable[[], None]:
        """The recorded step, which is recorded at its first use."""
        key = (bucket, extras)
        if key not in self._replays:
            self._replays[key] = self._record(self._step(bucket, extras))
        return self._replays[key]

    def _step(self, bucket: int, extras: bool) -> Callable[[], None]:
        state, rows = self._state, self._rows[:bucket]
        batch, sampling = state.batch(bucket), state.sampling(bucket)

        @torch.inference_mode()
        def step() -> None:
            state.prepare(bucket)
            logits = self._model.forward(StepInputs(state.tokens[:bucket], batch, rows))
            changed = self._extras.adjust(logits, state.drawn[:bucket]) if extras else logits
            state.sampled[:bucket].copy_(sample(changed, sampling))
            if extras:
                sampled, remaining = state.sampled[:bucket], state.remaining[:bucket]
                self._extras.record_logprobs(logits, sampled, remaining)
            state.finish(bucket)

        return step


def _run_once(work: Callable[[], None]) -> Callable[[], None]:
    work()  # as capture does, so that all launches exist
    return work
