"""What an engine counts of requests and steps beside its queues' and its cache's own numbers.

Plain integers and bucket lists of the one thread that steps: a few additions for a request, a few
for a step, none for a token.
"""

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence

from rayfin.actors.errors import (
    InvalidRequest,
    Overloaded,
    RayfinError,
    RequestHandedBack,
    RequestQuarantined,
)
from rayfin.actors.histogram import Histogram, one_two_five
from rayfin.actors.metrics.families import (
    FAILURES,
    ITERATION_BOUNDS,
    ITL_BOUNDS,
    LATENCY_BOUNDS,
    PREEMPTION_BOUNDS,
)
from rayfin.actors.scheduler.state.request import Request

REFUSALS: dict[type[RayfinError], str] = {
    Overloaded: "queue_full",
    RequestHandedBack: "draining",
    RequestQuarantined: "quarantined",
    InvalidRequest: "invalid",
}


class EngineCounters:
    """Counters from zero, of this engine's life.

    Phases as in vLLM: queue is arrival to admission, prefill from there to the first token, decode
    from there to the last one, inference both. The first two are observed when they end, the others
    of requests that end with a whole answer.
    """

    def __init__(self, max_model_len: int) -> None:
        tokens = one_two_five(max_model_len)
        self.incarnation = uuid.uuid4().hex
        self.tokens_computed = 0
        self.tokens_cached = 0
        self.runner_restarts = 0
        self.step_seconds = 0.0  # of the runners
        self.rejected: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._prompt = Histogram(tokens)
        self._generation = Histogram(tokens)
        self._max_tokens = Histogram(tokens)
        self._prefill_computed = Histogram(tokens)
        self._preemptions = Histogram(PREEMPTION_BOUNDS)
        self._iteration: dict[int, int] = {}  # tokens of a step -> steps
        self._queue = Histogram(LATENCY_BOUNDS)
        self._prefill = Histogram(LATENCY_BOUNDS)
        self._decode = Histogram(LATENCY_BOUNDS)
        self._inference = Histogram(LATENCY_BOUNDS)
        self._per_token = Histogram(ITL_BOUNDS)
        self.transport = Histogram(ITL_BOUNDS)  # of steps; StepOverheadTimer's

    def admitted(self, request: Request) -> None:
        """It runs for the first time."""
        assert request.admitted_at is not None
        self._queue.observe(request.admitted_at - request.arrival)
        self.tokens_cached += request.cached_tokens
        self.tokens_computed += request.num_tokens - request.cached_tokens

    def first_tokens(self, requests: Iterable[Request], now: float) -> None:
        """Their prompts have come to their ends, for the first time or again."""
        for request in requests:
            if request.first_token_at is None and request.admitted_at is not None:
                request.first_token_at = now
                self._prefill.observe(now - request.admitted_at)

    def step(self, prefill: int, sampled: Sequence[int], steps: int, seconds: float) -> None:
        """A lease of ``steps`` steps took ``seconds``.

        Args:
            prefill: prompt tokens that the first one computed.
            sampled: tokens that each one gave to requests that still live.
        """
        self.step_seconds += seconds
        iteration, first = self._iteration, prefill + (sampled[0] if sampled else 0)
        iteration[first] = iteration.get(first, 0) + 1
        if steps > 1:
            for count in sampled[1:steps]:
                iteration[count] = iteration.get(count, 0) + 1

    def ended(self, request: Request, generated: int, reason: str, now: float) -> None:
        """It has ended in any way but to go on elsewhere."""
        prompt = len(request.source.prompt)
        self._prompt.observe(prompt)
        self._generation.observe(generated)
        self._max_tokens.observe(request.source.stopping.max_tokens)
        self._preemptions.observe(request.preemptions)
        first = request.first_token_at
        if request.admitted_at is None:
            return
        self._prefill_computed.observe(prompt - min(prompt, request.cached_tokens))
        if first is None or reason not in ("stop", "length"):
            return
        self._decode.observe(now - first)
        self._inference.observe(now - request.admitted_at)
        self._per_token.observe((now - first) / max(1, generated - len(request.source.output) - 1))

    def refused(self, error: RayfinError) -> None:
        """A newcomer did not come in."""
        for kind, reason in REFUSALS.items():
            if isinstance(error, kind):
                self.rejected[reason] += 1
                return

    def failure(self, error: RayfinError) -> None:
        """A request ended with an error."""
        self.failed[error.code if error.code in FAILURES else "other"] += 1

    def histograms(self) -> dict[str, Histogram]:
        """Copies by name; another thread may ask."""
        iteration = Histogram(ITERATION_BOUNDS)
        for tokens, steps in self._iteration.copy().items():
            iteration.observe(tokens, steps)
        return {
            "request_prompt_tokens": self._prompt.copy(),
            "request_generation_tokens": self._generation.copy(),
            "request_params_max_tokens": self._max_tokens.copy(),
            "request_prefill_kv_computed_tokens": self._prefill_computed.copy(),
            "request_num_preemptions": self._preemptions.copy(),
            "iteration_tokens_total": iteration,
            "request_queue_time_seconds": self._queue.copy(),
            "request_prefill_time_seconds": self._prefill.copy(),
            "request_decode_time_seconds": self._decode.copy(),
            "request_inference_time_seconds": self._inference.copy(),
            "request_time_per_output_token_seconds": self._per_token.copy(),
            "step_transport_seconds": self.transport.copy(),
        }
