"""What an engine counts of requests and steps.

Plain integers and bucket lists that one thread writes: a few additions for a request, a few for a
step, none for a token.
"""

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import Any

from rayfin.actors.errors import (
    InvalidRequest,
    Overloaded,
    RayfinError,
    RequestHandedBack,
    RequestQuarantined,
)
from rayfin.actors.histogram import Histogram, one_two_five
from rayfin.actors.messages import DraftUsage, GrammarUsage, ImageUsage
from rayfin.actors.metrics.families import (
    COMPILE_BOUNDS,
    FAILURES,
    ITERATION_BOUNDS,
    ITL_BOUNDS,
    LATENCY_BOUNDS,
    MASK_BOUNDS,
    PREEMPTION_BOUNDS,
)
from rayfin.actors.scheduler.state.adapter_counters import AdapterCounters
from rayfin.actors.scheduler.state.request import Request

REFUSALS: dict[type[RayfinError], str] = {
    Overloaded: "queue_full",
    RequestHandedBack: "draining",
    RequestQuarantined: "quarantined",
    InvalidRequest: "invalid",
}


GRAMMAR_REASONS: dict[str, str] = {
    "grammar_failed": "failed",
    "grammar_too_slow": "too_slow",
}
"""Error codes of requests that failed by their grammar, and their reasons in the metrics."""


class GrammarHistograms:
    """Compilation of grammars, waiting for it, and masks."""

    def __init__(self) -> None:
        self.compile = Histogram(COMPILE_BOUNDS)
        self.wait = Histogram(COMPILE_BOUNDS)
        self.mask = Histogram(MASK_BOUNDS)

    def copies(self) -> dict[str, Histogram]:
        """Copies by name; safe to call from another thread."""
        return {
            "grammar_compile_seconds": self.compile.copy(),
            "grammar_wait_seconds": self.wait.copy(),
            "grammar_mask_seconds": self.mask.copy(),
        }


class RequestHistograms:
    """Lengths and latencies of requests, and sizes of steps."""

    def __init__(self, max_model_len: int) -> None:
        tokens = one_two_five(max_model_len)
        self.prompt = Histogram(tokens)
        self.generation = Histogram(tokens)
        self.max_tokens = Histogram(tokens)
        self.prefill_computed = Histogram(tokens)
        self.preemptions = Histogram(PREEMPTION_BOUNDS)
        self.iteration: dict[int, int] = {}  # tokens of a step -> steps
        self.queue = Histogram(LATENCY_BOUNDS)
        self.prefill = Histogram(LATENCY_BOUNDS)
        self.decode = Histogram(LATENCY_BOUNDS)
        self.inference = Histogram(LATENCY_BOUNDS)
        self.per_token = Histogram(ITL_BOUNDS)
        self.step_overhead = Histogram(ITL_BOUNDS)
        self.grammars = GrammarHistograms()
        self.encode = Histogram(COMPILE_BOUNDS)

    def copies(self) -> dict[str, Histogram]:
        """Copies by name; safe to call from another thread."""
        iteration = Histogram(ITERATION_BOUNDS)
        for tokens, steps in self.iteration.copy().items():
            iteration.observe(tokens, steps)
        return {
            "request_prompt_tokens": self.prompt.copy(),
            "request_generation_tokens": self.generation.copy(),
            "request_params_max_tokens": self.max_tokens.copy(),
            "request_prefill_kv_computed_tokens": self.prefill_computed.copy(),
            "request_num_preemptions": self.preemptions.copy(),
            "iteration_tokens_total": iteration,
            "request_queue_time_seconds": self.queue.copy(),
            "request_prefill_time_seconds": self.prefill.copy(),
            "request_decode_time_seconds": self.decode.copy(),
            "request_inference_time_seconds": self.inference.copy(),
            "request_time_per_output_token_seconds": self.per_token.copy(),
            "step_transport_seconds": self.step_overhead.copy(),
            "image_encode_seconds": self.encode.copy(),
            **self.grammars.copies(),
        }


@dataclass(eq=False)
class EngineCounters:
    """Counters from zero, of this engine's life; named as in ``EngineStats``, which reports them.

    Phases as in vLLM: queue is arrival to admission, prefill from there to the first token, decode
    from there to the last one, inference both. The first two are observed when they end, the others
    when a request ends with a whole answer.
    """

    max_model_len: InitVar[int]
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    steps: int = 0
    preemptions: int = 0
    preemptions_by_swap: int = 0
    requeued_by_restart: int = 0
    swapped_out: int = 0
    swapped_in: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    last_step_seconds: float = 0.0
    runner_restarts: int = 0
    step_seconds: float = 0.0
    tokens_computed: int = 0
    tokens_cached: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    grammars_loaded: int = 0
    grammar_hits: int = 0
    grammar_misses: int = 0
    grammar_failures: Counter[str] = field(default_factory=Counter)
    image_cache_bytes: int = 0
    image_cache_hits: int = 0
    images_encoded: int = 0
    image_cache_evictions: int = 0
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_accepted_by_position: Counter[str] = field(default_factory=Counter)
    disk_pages_read: int = 0
    disk_pages_written: int = 0
    disk_pages_unreadable: int = 0

    def __post_init__(self, max_model_len: int) -> None:
        self.observed = RequestHistograms(max_model_len)
        self.adapters = AdapterCounters()

    def totals(self) -> dict[str, Any]:
        """The counters by name, copied; safe to call from another thread."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            name: dict(value) if isinstance(value, Counter) else value
            for name, value in values.items()
        }

    def histograms(self) -> dict[str, Histogram]:
        """Copies by name; safe to call from another thread."""
        return {**self.observed.copies(), "adapter_load_seconds": self.adapters.load.copy()}

    def admitted(self, request: Request) -> None:
        """The request was admitted for the first time."""
        assert request.admitted_at is not None
        self.observed.queue.observe(request.admitted_at - request.arrival)
        self.tokens_cached += request.cached_tokens
        self.tokens_computed += request.num_tokens - request.cached_tokens

    def first_tokens(self, requests: Iterable[Request], now: float) -> None:
        """The requests' prompts are computed, for the first time or again."""
        for request in requests:
            if request.first_token_at is None and request.admitted_at is not None:
                request.first_token_at = now
                self.observed.prefill.observe(now - request.admitted_at)

    def step(self, prefill: int, sampled: Sequence[int], steps: int, seconds: float) -> None:
        """A call of ``steps`` steps took the runner ``seconds``.

        Args:
            prefill: prompt tokens that the first step computed.
            sampled: tokens of live requests, for each step.
        """
        self.steps += steps
        self.last_step_seconds = seconds
        self.step_seconds += seconds
        iteration, first = self.observed.iteration, prefill + (sampled[0] if sampled else 0)
        iteration[first] = iteration.get(first, 0) + 1
        if steps > 1:
            for count in sampled[1:steps]:
                iteration[count] = iteration.get(count, 0) + 1

    def grammars(self, usage: GrammarUsage) -> None:
        """A step's runner has used grammars."""
        self.grammars_loaded = usage.loaded
        self.grammar_hits += usage.hits
        self.grammar_misses += usage.misses
        for seconds in usage.compile_seconds:
            self.observed.grammars.compile.observe(seconds)
        for seconds in usage.mask_seconds:
            self.observed.grammars.mask.observe(seconds)

    def images(self, usage: ImageUsage) -> None:
        """A step's runner has begun images."""
        self.image_cache_bytes = usage.num_bytes
        self.image_cache_hits += usage.hits
        self.image_cache_evictions += usage.evictions
        self.images_encoded += len(usage.seconds)
        for seconds in usage.seconds:
            self.observed.encode.observe(seconds)

    def drafts(self, usage: DraftUsage) -> None:
        """A call's runner has verified drafts."""
        self.spec_drafts += usage.drafts
        self.spec_draft_tokens += usage.tokens
        self.spec_accepted_tokens += usage.num_accepted
        for place, accepted in enumerate(usage.accepted):
            self.spec_accepted_by_position[str(place)] += accepted

    def ended(self, request: Request, generated: int, reason: str, now: float) -> None:
        """The request has ended, and does not continue on another engine."""
        prompt = len(request.source.prompt)
        self.observed.prompt.observe(prompt)
        self.observed.generation.observe(generated)
        self.observed.max_tokens.observe(request.source.stopping.max_tokens)
        self.observed.preemptions.observe(request.preemptions)
        first = request.first_token_at
        if request.admitted_at is None:
            return
        self.observed.prefill_computed.observe(prompt - min(prompt, request.cached_tokens))
        if first is None or reason not in ("stop", "length", "repetition"):
            return
        self.observed.decode.observe(now - first)
        self.observed.inference.observe(now - request.admitted_at)
        self.observed.per_token.observe(
            (now - first) / max(1, generated - len(request.source.output) - 1)
        )

    def refused(self, error: RayfinError) -> None:
        """A new request was refused."""
        for kind, reason in REFUSALS.items():
            if isinstance(error, kind):
                self.rejected[reason] += 1
                return

    def failure(self, error: RayfinError) -> None:
        """A request ended with an error."""
        self.failed[error.code if error.code in FAILURES else "other"] += 1
        if error.code in GRAMMAR_REASONS:
            compiled = not isinstance(error, InvalidRequest)
            self.grammar_failures[GRAMMAR_REASONS[error.code] if compiled else "compile"] += 1
