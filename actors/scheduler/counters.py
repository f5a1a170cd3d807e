"""What an engine counts of requests and steps.

Plain integers and bucket lists that one thread writes: a few additions for a request, a few for a
step, none for a token.
"""

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from rayfin.actors.adapters.part import AdapterUsage
from rayfin.actors.errors import (
    InvalidRequest,
    Overloaded,
    RayfinError,
    RequestHandedBack,
    RequestQuarantined,
)
from rayfin.actors.guidance import GrammarUsage
from rayfin.actors.media.part import MediaUsage
from rayfin.actors.metric import Histogram, one_two_five
from rayfin.actors.metrics.engine_stats import ENGINE_HISTOGRAMS, FAILURES, EngineStats
from rayfin.actors.parts import PartUsage
from rayfin.actors.plugins import PluginUsage
from rayfin.actors.scheduler.adapter_counters import AdapterCounters
from rayfin.actors.scheduler.request import Request
from rayfin.actors.speculation import DraftUsage

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


class EngineCounters(EngineStats):
    """Counts from zero, of this engine's life.

    Phases as in vLLM: queue is arrival to admission, prefill from there to the first token, decode
    from there to the last one, inference both. The first two are observed when they end, the others
    when a request ends with a whole answer.
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = one_two_five(max_model_len)
        super().__init__(
            incarnation=uuid.uuid4().hex,
            histograms={one.name: Histogram(one.bounds or tokens) for one in ENGINE_HISTOGRAMS},
        )
        self.of_adapters = AdapterCounters(self.histograms["adapter_load_seconds"])

    def snapshot(self, **now: Any) -> EngineStats:
        """Returns a copy with the fields ``now``; safe to call from another thread."""
        values = {one.name: getattr(self, one.name) for one in fields(EngineStats)}
        copies: dict[str, Any] = {
            name: Counter(counter)
            for name, counter in values.items()
            if isinstance(counter, Counter)
        }
        copies["histograms"] = {
            name: histogram.copy() for name, histogram in self.histograms.items()
        }
        return EngineStats(**(values | copies | now))

    @property
    def preparation(self) -> Histogram:
        """Waits of requests for what runners prepare."""
        return self.histograms["grammar_wait_seconds"]

    def _observe(self, name: str, *values: float) -> None:
        histogram = self.histograms[name]
        for value in values:
            histogram.observe(value)

    def admitted(self, request: Request) -> None:
        """The request was admitted for the first time."""
        assert request.admitted_at is not None
        self._observe("request_queue_time_seconds", request.admitted_at - request.arrival)
        self.tokens_cached += request.cached_tokens
        self.tokens_computed += request.num_tokens - request.cached_tokens

    def first_tokens(self, requests: Iterable[Request], now: float) -> None:
        """The requests' prompts are computed, for the first time or again."""
        for request in requests:
            if request.first_token_at is None and request.admitted_at is not None:
                request.first_token_at = now
                self._observe("request_prefill_time_seconds", now - request.admitted_at)

    def step(self, prefill: int, sampled: Sequence[int], steps: int, seconds: float) -> None:
        """A call of ``steps`` steps took the runner ``seconds``.

        Args:
            prefill: prompt tokens that the first step computed.
            sampled: tokens of live requests, for each step.
        """
        self.steps += steps
        self.last_step_seconds = seconds
        self.step_seconds += seconds
        iteration = self.histograms["iteration_tokens_total"]
        iteration.observe(prefill + (sampled[0] if sampled else 0))
        for count in sampled[1:steps]:
            iteration.observe(count)

    def grammars(self, usage: GrammarUsage) -> None:
        """A step's runner has used grammars."""
        self.grammars_loaded = usage.loaded
        self.grammar_hits += usage.hits
        self.grammar_misses += usage.misses
        self._observe("grammar_compile_seconds", *usage.compile_seconds)
        self._observe("grammar_mask_seconds", *usage.mask_seconds)

    def images(self, usage: MediaUsage) -> None:
        """A step's runner has begun images."""
        self.image_cache_bytes = usage.num_bytes
        self.image_cache_hits += usage.hits
        self.image_cache_evictions += usage.evictions
        self.images_encoded += len(usage.seconds)
        self._observe("image_encode_seconds", *usage.seconds)

    def drafts(self, usage: DraftUsage) -> None:
        """A call's runner has verified drafts."""
        self.spec_drafts += usage.drafts
        self.spec_draft_tokens += usage.tokens
        self.spec_accepted_tokens += usage.num_accepted
        for place, accepted in enumerate(usage.accepted):
            self.spec_accepted_by_position[str(place)] += accepted

    def used(self, usage: PartUsage) -> None:
        """A step's runner has done something for a feature."""
        match usage:
            case DraftUsage():
                self.drafts(usage)
            case GrammarUsage():
                self.grammars(usage)
            case AdapterUsage():
                self.of_adapters.observe(usage)
            case MediaUsage():
                self.images(usage)
            case PluginUsage():
                self.plugin_seconds.update(usage.seconds)

    def ended(self, request: Request, generated: int, reason: str, now: float) -> None:
        """The request has ended, and does not continue on another engine."""
        prompt = len(request.source.prompt)
        self._observe("request_prompt_tokens", prompt)
        self._observe("request_generation_tokens", generated)
        self._observe("request_params_max_tokens", request.source.stopping.max_tokens)
        self._observe("request_num_preemptions", request.preemptions)
        first = request.first_token_at
        if request.admitted_at is None:
            return
        computed = prompt - min(prompt, request.cached_tokens)
        self._observe("request_prefill_kv_computed_tokens", computed)
        if first is None or reason not in ("stop", "length", "repetition"):
            return
        self._observe("request_decode_time_seconds", now - first)
        self._observe("request_inference_time_seconds", now - request.admitted_at)
        tokens = max(1, generated - len(request.source.output) - 1)
        self._observe("request_time_per_output_token_seconds", (now - first) / tokens)

    def restart(self) -> None:
        """The runners are new and hold nothing."""
        self.of_adapters.restart()

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
