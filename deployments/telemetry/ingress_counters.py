"""Counters of one ingress: latencies as clients see them, answers, choices, and of features."""

import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from rayfin.actors.metric import (
    ITL_BOUNDS,
    LATENCY_BOUNDS,
    TTFT_BOUNDS,
    VLLM_ITL_BOUNDS,
    VLLM_LATENCY_BOUNDS,
    Histogram,
    counter,
    gauge,
    histogram,
    metrics_of,
    one_two_five,
)
from rayfin.actors.metrics.ledger import CounterReport

LONGEST = 10**6  # tokens; an output may be longer than the last bucket
MOST_IMAGES = 1000  # of a request; one may have more than the last bucket
CHOICES_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0)

REPLAY_REASONS = ("lost", "moved")
MOVES = tuple(itertools.product(("drain", "prefill"), ("moved", "stayed")))  # reasons and results
HANDLERS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v2/embed", "/score", "/v1/score", "/classify", "/pooling"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/v1/audio/transcriptions"),
    *(
        "/v1/audio/translations",
        "/invocations",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "other",
    ),
)
STATUSES = ("2xx", "3xx", "4xx", "5xx", "none")
GUIDED_KINDS = (*("json", "json_object", "regex", "choice", "grammar", "structural_tag", "tools"),)
VERDICTS = ("ok", "invalid", "unsupported", "too_complex")
TOOL_CHOICES = ("auto", "required", "named")
IMAGE_REFUSALS = (
    *("invalid_image", "invalid_audio", "media_url_refused", "media_unavailable"),
    *("too_many_images", "too_many_audios", "unsupported_content", "other"),
)
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
BATCH_LINES = ("ok", "error", "expired")


@dataclass(slots=True)
class MediaCounters:
    """Images and clips of requests. Used in the event loop only."""

    images: Histogram = histogram(
        "request_images", "Images or clips of a request.", one_two_five(MOST_IMAGES)
    )
    fetch: Histogram = histogram(
        "image_fetch_seconds", "Of an image or clip, from an address.", LATENCY_BOUNDS
    )
    refusals: dict[str, int] = counter(
        "image_refusals", "Requests refused for media.", "code", IMAGE_REFUSALS
    )

    def refused(self, code: str | None) -> None:
        """Counts a request that was refused for an image, by the error's code."""
        self.refusals[code if code in IMAGE_REFUSALS else "other"] += 1


@dataclass(slots=True)
class BatchCounters:
    """Batches of a folder, as its worker reports them."""

    open: dict[str, int] = gauge(
        "batches_open", "Batches that have not ended, by status.", "status", OPEN_STATUSES
    )
    lines_waiting: int = gauge("batch_lines_waiting", "Lines of open batches without an answer.")
    seconds_behind: float = gauge(
        "batch_seconds_behind",
        "How long after its window the latest open batch would end at its pace; 0: all in time.",
    )
    lines: dict[str, int] = counter(
        "batch_lines", "Lines of batches, by what became of them.", "result", BATCH_LINES
    )


@dataclass(slots=True)
class _Group:
    """The choices of one prompt."""

    open: int = 0
    begun: int = 0
    longest: int = 0  # tokens


@dataclass
class IngressCounters:
    """Counters of one ingress since its start; used in its event loop only.

    ``now_in_flight`` returns the number of HTTP requests that generate tokens now. Counting a word
    that is not of its label's set makes no series.
    """

    now_in_flight: Callable[[], int] = lambda: 0
    ttft: Histogram = histogram(
        "time_to_first_token_seconds",
        "From the HTTP request's arrival to the first token at the edge.",
        TTFT_BOUNDS,
        alias=True,
    )
    itl: Histogram = histogram(
        "inter_token_latency_seconds",
        "Between a request's tokens; those of one message share its gap.",
        ITL_BOUNDS,
        alias=True,
        alias_bounds=VLLM_ITL_BOUNDS,
    )
    e2e: Histogram = histogram(
        "e2e_request_latency_seconds",
        "From the HTTP request's arrival to the last token.",
        LATENCY_BOUNDS,
        alias=True,
        alias_bounds=VLLM_LATENCY_BOUNDS,
    )
    ingress_time: Histogram = histogram(
        "ingress_time_seconds",
        "From the HTTP request's arrival until it goes to an engine: checks, template, tokens.",
        LATENCY_BOUNDS,
    )
    first_flush: Histogram = histogram(
        "first_flush_seconds",
        "From a streamed HTTP request's arrival to the first event on the wire.",
        TTFT_BOUNDS,
    )
    transit: Histogram = histogram(
        "request_transport_seconds",
        "To the engine, until its loop takes the request in, and back with the first token.",
        ITL_BOUNDS,
    )
    choices: Histogram = histogram(
        "request_params_n", "Choices of a prompt.", CHOICES_BOUNDS, alias=True
    )
    longest: Histogram = histogram(
        "request_max_num_generation_tokens",
        "Tokens of a prompt's longest choice.",
        one_two_five(LONGEST),
        alias=True,
    )
    disconnects: int = counter("client_disconnects", "Requests given up by their client.")
    replays: dict[str, int] = counter(
        "request_replays",
        "Times that a request was sent again, its engine lost or the request handed back.",
        "reason",
        REPLAY_REASONS,
    )
    moves: dict[tuple[str, str], int] = counter(
        "moves",
        "Streams that should go on at another engine, and whether it has read their pages.",
        labels=("reason", "result"),
        words=MOVES,
    )
    answers: dict[tuple[str, str], int] = counter(
        "http_requests",
        "Answers, by route and status.",
        labels=("handler", "status"),
        words=tuple(itertools.product(HANDLERS, STATUSES)),
    )
    in_flight: int = gauge("http_requests_in_flight", "Requests for tokens that are not answered.")
    replicas: int = gauge("ingress_replicas", "Ingresses that were heard of lately.", default=1)
    reported: float = gauge(
        "ingress_reported_timestamp_seconds",
        "Unix time of the oldest last report of an ingress.",
        earliest=True,
    )
    guided_requests: dict[str, int] = counter(
        "guided_requests",
        "Requests with a grammar, by what it was made from.",
        "kind",
        GUIDED_KINDS,
    )
    grammar_verdicts: dict[str, int] = counter(
        "grammar_verdicts", "Grammars that were checked.", "verdict", VERDICTS
    )
    warden_restarts: int = counter(
        "warden_restarts", "Times the process that checks them was replaced."
    )
    tool_calls: dict[str, int] = counter(
        "tool_calls", "Tool calls in answers.", "choice", TOOL_CHOICES
    )
    tool_calls_unparsed: int = counter(
        "tool_calls_unparsed", "Calls that did not parse, given as text."
    )
    tool_calls_cut: int = counter("tool_calls_cut", "Calls that the end of the answer cut off.")
    reasoning_tokens: int = counter("reasoning_tokens", "Output tokens of thoughts.")
    thinking_budgets_spent: int = counter(
        "thinking_budgets_spent", "Thoughts that their budget ended."
    )
    # The formats of calls and of thoughts in the model's answers.
    output_format: dict[tuple[str, str], int] = gauge(
        "output_format",
        "Ingresses that read answers so; the labels name the formats of calls and of thoughts.",
        labels=("tools", "reasoning"),
    )
    media: MediaCounters = field(default_factory=MediaCounters)
    batches: BatchCounters = field(default_factory=BatchCounters)

    def __post_init__(self) -> None:
        self._groups: dict[int, _Group] = {}  # by the first choice's key
        self._incarnation = uuid.uuid4().hex
        self.reads(None, None)

    def reads(self, tools: str | None, reasoning: str | None) -> None:
        """Names the formats of calls and of thoughts in the model's answers, or None."""
        self.output_format = {(tools or "none", reasoning or "none"): 1}

    def checked(self, verdict: str) -> None:
        """Counts a grammar that was checked; ``verdict`` is one of VERDICTS."""
        self.grammar_verdicts[verdict] += 1

    def warden_restarted(self) -> None:
        """Counts a replacement of the process that checks grammars."""
        self.warden_restarts += 1

    def begun(self, group: int) -> None:
        """Counts one more choice of the prompt whose first choice has the key ``group``."""
        choices = self._groups.setdefault(group, _Group())
        choices.open += 1
        choices.begun += 1

    def over(self, group: int, tokens: int) -> None:
        """Counts a choice that ended with ``tokens`` tokens; the last one completes the prompt."""
        choices = self._groups[group]
        choices.open -= 1
        choices.longest = max(choices.longest, tokens)
        if not choices.open:
            del self._groups[group]
            self.choices.observe(choices.begun)
            self.longest.observe(choices.longest)

    def answered(self, path: str, status: int | None) -> None:
        """Counts an HTTP request that has ended; ``status`` is None if its client left before."""
        path = path.removesuffix("/")
        handler = path if path in HANDLERS else "other"
        answer = "none" if status is None else f"{status // 100}xx"
        self.answers[handler, answer if answer in STATUSES else "none"] += 1

    def latency(self) -> dict[str, tuple[float, int]]:
        """Returns sums in seconds and counts, for a page that shows their growth."""
        return {"ttft": (self.ttft.sum, self.ttft.count), "itl": (self.itl.sum, self.itl.count)}

    def report(self) -> CounterReport:
        """Returns all counters, zeros included."""
        self.in_flight, self.reported = self.now_in_flight(), time.time()
        report = CounterReport(self._incarnation)
        for counts in (self, self.media, self.batches):
            report.read(counts)
        report.histograms = {series: one.copy() for series, one in report.histograms.items()}
        return report


INGRESS_METRICS = metrics_of(IngressCounters, MediaCounters, BatchCounters)
