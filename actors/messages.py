"""All messages between actors, in the order in which a request meets them.

    ingress   ── EngineRequest ──►  scheduler     once per request (a list per call)
    scheduler ── SchedulerInfo ──►  runners       once per step, deltas only
    runner    ── StepResult ─────►  scheduler     once per step
    scheduler ── TokenDeltas ────►  ingress       once per step and ingress

Arrays are int32 NumPy in struct-of-arrays form: a step of 256 rows pickles in tens of
microseconds, a dict per request would take hundreds. No torch here: the control plane has none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfin.actors.errors import RayfinError, RequestFailed
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.parts import P, PartFacts, PartUsage, RequestPart, first_of
from rayfin.actors.settings.bidirectional import Bidirectional
from rayfin.actors.settings.choices import LogprobsMode
from rayfin.actors.timing import LOOP_COMMAND_SECONDS, MODEL_LOAD_SECONDS, PAGE_READ_SECONDS
from rayfin.actors.weights.spans import Spans
from rayfin.cache.prefix_index import Digests, NameChanges

if TYPE_CHECKING:
    from rayfin.actors.config import EngineConfig

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

SAMPLED_LAST_STEP = -1
"""In ``merge_prompt``: the token that this request sampled last, which the runner knows."""

NO_TOKEN = -1
"""In ``last_pos`` and ``StepResult.tokens``: a chunk that ends mid-prompt samples nothing."""

NO_STEP = -1
"""Epoch and step of a message outside of any step (a refusal at admission)."""

COPY, SWAP_OUT, SWAP_IN = 0, 1, 2
"""Kinds of ``SchedulerInfo.moves``: copy of a page, to host memory, back from host memory."""

STATE_COPY, STATE_SAVE, STATE_LOAD = 3, 4, 5
"""Moves of recurrent layers' states: from slot to slot, slot to snapshot, snapshot to slot."""


class PagesAt(NamedTuple):
    """An engine, and how many of a prompt's first pages it may have."""

    engine: str
    pages: int


HOST = "host"
"""The source of pages in host memory; engines have longer names."""


@dataclass(slots=True, frozen=True)
class PageTransfer:
    """Full pages to read from where they are, or to write to files, beside the steps.

    Nothing else uses the pages of a read, once the steps before it have run. Those of a write are
    full, and their steps have run.
    """

    write: bool
    pages: list[int]  # [N]
    hashes: list[bytes]  # [N] of all tokens up to their ends
    tokens: Int32Array  # [N, page_size] in them
    before: list[bytes]  # hashes of the pages before them, which stay as long as these
    forget: bool = False  # removes all files instead
    named: NameChanges | None = None  # only brings names, of an engine without a step to send
    source: str = ""  # the engine that has them, or HOST; empty: the disk
    seconds: float = PAGE_READ_SECONDS  # that another engine has for all of them
    snapshot: int | None = None  # for the state behind them, of recurrent layers: the pages of a
    # read count up to the last one behind which there is a state
    moves: Int32Array | None = None  # [M, 3] as in SchedulerInfo, before a page is written to
    after: tuple[int, int] = (0, -1)  # epoch and number of the last step before it; the executor's


def no_moves() -> Int32Array:
    return np.zeros((0, 3), np.int32)


@dataclass(slots=True, frozen=True)
class Sampling:
    """One request's sampling settings for the runner."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    banned: tuple[int, ...] = ()  # token ids that may not be sampled ...
    banned_until: int = 0  # ... at positions of the request below this (min_tokens)
    presence_penalty: float = 0.0  # subtracted from each logit whose token is in the output
    frequency_penalty: float = 0.0  # and this for each of its occurrences
    repetition_penalty: float = 1.0  # divides logits of tokens of prompt or output (CTRL)
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    allowed: tuple[int, ...] = ()  # the only token ids that may be sampled; () is all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token strings that may not be completed
    logprobs: int | None = None  # return each token's, and those of so many likeliest tokens
    logprob_ids: tuple[int, ...] = ()  # or those of these tokens instead of the likeliest
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    prompt_logprob_start: int = 0  # index of the first token whose next one is scored
    prompt_logprob_ids: tuple[tuple[int, ...], ...] = ()  # those of these, row by row from there
    processed: bool = False  # log probabilities are those that tokens are drawn by, after all rules

    @property
    def needs_history(self) -> bool:
        """Whether the runner needs the request's tokens, past and future ones."""
        needs = self.penalises or bool(self.bad_words)
        return needs or self.prompt_logprobs is not None

    @property
    def penalises(self) -> bool:
        """Whether logits depend on earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


@dataclass(slots=True, frozen=True)
class Repetition:
    """When an output repeats itself: a pattern of tokens stands several times at its end."""

    longest: int  # tokens of a pattern
    shortest: int
    copies: int  # of the pattern, one after the other
    after: int = 0  # not before the output has so many tokens (min_tokens)


@dataclass(slots=True, frozen=True)
class StopRules:
    """When the scheduler ends a request; the ingress handles stop *strings*."""

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()  # end of sequence included, unless ignored
    eos_token_ids: frozenset[int] = frozenset()  # of those, the ones not reported as stop_reason
    repetition: Repetition | None = None


@dataclass(slots=True, frozen=True)
class BeamParams:
    """Beam search, with the meaning that transformers' ``generate`` gives to each setting."""

    width: int  # beams, and hypotheses handed back
    length_penalty: float = 1.0  # a score is divided by length ** length_penalty
    early_stopping: bool | Literal["never"] = False


@dataclass(slots=True, frozen=True)
class Pin:
    """How much of a prompt stays in the prefix cache, and for how long."""

    tokens: int  # from its start
    seconds: float  # from its first token


@dataclass(slots=True, frozen=True)
class SessionRef:
    """The session that a request is a turn of."""

    name: str  # among those of its tenant
    parent: str = ""  # the session that waits for this one, as an agent does for its subagents
    final: bool = False  # no turn follows
    fresh: bool = False  # its context was compacted: it begins anew
    aside: bool = False  # a title or a probe: the session's context is another one

    def digest(self, tenant: str) -> bytes:
        """Eight bytes that stand for the session of a tenant."""
        return sha256(f"{tenant}\0{self.name}".encode()).digest()[:8]


@dataclass(slots=True, frozen=True)
class Receipt:
    """What an answer must have in common with an earlier one, to go on where that broke off."""

    answer_id: str
    created: int  # seconds since 1970
    digest: bytes  # of the HTTP request's body


@dataclass(slots=True)
class EngineRequest:
    """One prompt on its way to an engine. The server makes ``request_id``, never a client."""

    request_id: str
    prompt: Int32Array  # [P]
    sampling: Sampling
    stopping: StopRules
    client: str = ""  # the subscription that receives this request's tokens
    key: int = 0  # the client's own number of this request; its tokens come back under it
    priority: int = 0  # lower runs earlier
    arrival: float = 0.0  # time.monotonic() of the ingress, seconds
    output: list[int] = field(default_factory=list)  # tokens already delivered, on a resubmission
    extra_keys: tuple[str, ...] = ()  # what keys and values depend on beside tokens and parts: salt
    tenant: str = ""  # whom its tokens are counted for under the fair policy
    timeout: float | None = None  # seconds from its arrival at the scheduler; then it is dropped
    parent_key: int | None = None  # key of an earlier choice of the same prompt, to fork from
    beams: BeamParams | None = None
    satisfied: bool = False  # the client's: a stop string came, so to close its stream is no abort
    whole: bool = False  # the client's: its tokens may come together at its end
    underway: bool = False  # the client's: others of the same HTTP request have had an engine
    deaths: int = 0  # of engines and runners, while they had it in flight
    session: SessionRef | None = None  # its requests go to one engine, as long as it takes them
    receipt: Receipt | None = None  # its tokens stay known for a while after its end, to go on from
    timed: bool = False  # its first token brings ``TokenDeltas.begun``
    pin: Pin | None = None
    background: bool = False  # it runs where nothing else has to wait for it
    parts: tuple[RequestPart, ...] = ()  # what it has beside tokens; those of a kind in their order
    spans: Spans = ()  # versions of the weights that made ``output``
    pages_at: PagesAt | None = None  # who may have more of its prompt than the engine it is sent to

    def use(self, part: RequestPart) -> None:
        """Adds a part."""
        self.parts = (*self.parts, part)

    def part(self, kind: type[P]) -> P | None:
        """Returns its first part of a kind, or None."""
        return first_of(self.parts, kind) if self.parts else None

    @property
    def is_plain(self) -> bool:
        """Returns whether its answer is tokens alone."""
        asked = self.sampling
        scored = (asked.logprobs, asked.prompt_logprobs) != (None, None) or asked.logprob_ids
        return not scored and self.beams is None

    @property
    def prefix_keys(self) -> tuple[str, ...]:
        """All that keys and values depend on beside tokens."""
        if not self.parts:
            return self.extra_keys
        return (*self.extra_keys, *(part.key for part in self.parts if part.key))

    @property
    def samples(self) -> bool:
        """Whether it samples tokens; if not, it ends with a vector, and ``max_tokens`` is 0."""
        return not self.parts or all(part.samples for part in self.parts)


@dataclass(slots=True)
class NewRequest:
    """First sight of a request by the runners (again after a preemption)."""

    handle: int
    sampling: Sampling
    cap: int  # most tokens of the request, prompt included: a lease ends there
    stop_token_ids: frozenset[int] = frozenset()  # and at these
    history: Int32Array | None = None  # [N] its known tokens, where sampling needs them ...
    prompt_len: int = 0  # ... and how many of those are prompt
    extra_keys: tuple[str, ...] = ()  # EngineRequest.prefix_keys
    tenant: str = ""  # EngineRequest.tenant
    parts: tuple[RequestPart, ...] = ()  # EngineRequest.parts

    def part(self, kind: type[P]) -> P | None:
        """Returns its first part of a kind, or None."""
        return first_of(self.parts, kind) if self.parts else None


@dataclass(slots=True)
class SchedulerInfo:
    """One step: R rows over T tokens, decoding rows first, then prefill rows.

    The field names are those of the seed's V1 scheduler; ``chunk_prompts`` is the view
    ``merge_prompt[chunk_idx[i] : chunk_idx[i] + chunk_len[i]]``.
    """

    epoch: int
    step: int
    ids: Int32Array  # [R] handles: the runner's slot of each request
    chunk_idx: Int32Array  # [R] where the row's chunk starts in merge_prompt
    chunk_len: Int32Array  # [R] new tokens of the row; a decoding row has 1, and in the runner its
    # guessed ones
    merge_prompt: Int32Array  # [T] token ids, or SAMPLED_LAST_STEP
    kv_len: Int32Array  # [R] tokens in the cache before this step; with guesses in flight, at most
    kv_page_len: Int32Array  # [R] pages held for this step
    last_pos: Int32Array  # [R] index in the chunk whose logits are sampled, or NO_TOKEN
    is_decoding: BoolArray  # [R]
    decoding_batch: int
    prefill_batch: int
    new_pages: Int32Array  # [N * G] page ids appended this step, row after row: one of each group
    new_pages_len: Int32Array  # [R] how many entries of its table each row takes of them
    new_requests: list[NewRequest] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)  # handles to forget, before new_requests
    num_steps: int = 1  # decode steps granted
    moves: Int32Array = field(
        default_factory=no_moves
    )  # [M, 3] kind, from page, to page (slots and
    # snapshots for states); before everything else of the step, in this order
    grants: Int32Array | None = None  # [R] most tokens that each row samples in this call, guesses
    # that are right among them; None if there are none: one in each decode step
    span_tokens: int = 0  # of all spans that its chunks reach into: a tower may have to run
    names: NameChanges | None = None  # of pages that hold what is known once the step has run
    states: dict[int, bytes] | None = None  # by snapshot that moves save to: the hash of the page
    # that ends there

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the rows that do not decode."""
        if not self.prefill_batch:
            return 0
        return len(self.merge_prompt) - int(self.chunk_idx[self.decoding_batch])

    @property
    def num_guessed(self) -> int:
        """Tokens of decoding rows that the runner's proposer has guessed."""
        return len(self.merge_prompt) - self.num_prefill_tokens - self.decoding_batch

    def chunk_prompt(self, row: int) -> Int32Array:
        """The tokens of one row's chunk (the seed's ``chunk_prompts[row]``)."""
        start = int(self.chunk_idx[row])
        return self.merge_prompt[start : start + int(self.chunk_len[row])]


@dataclass(slots=True)
class Logprobs:
    """Log probabilities (natural, of the model's raw logits unless ``Sampling.processed``) of N
    tokens, K likeliest beside each.

    K is the most that any of the N asks for; a token that asks for less ignores the rest.
    """

    at: Int32Array  # [N] which token: its index in the flattened ``tokens`` beside this
    chosen: Float32Array  # [N] of the token itself
    rank: Int32Array  # [N] of the token itself; 1 is the likeliest
    ids: Int32Array  # [N, K] the likeliest tokens, likeliest first
    values: Float32Array  # [N, K]
    kept_mass: Float32Array | None = None  # [N] that filters left, of what is processed; else NaN

    def renumbered(self, to: Int64Array) -> "Logprobs":
        """Those whose number ``to`` maps to one that is not negative, under that number."""
        at = to[self.at]
        kept = at >= 0
        return Logprobs(
            at[kept].astype(np.int32),
            self.chosen[kept],
            self.rank[kept],
            self.ids[kept],
            self.values[kept],
            None if self.kept_mass is None else self.kept_mass[kept],
        )

    def entries(self) -> "Iterator[tuple[int, TokenLogprob]]":
        """(number, what it says) of every token; what is padding is left out."""
        columns = (self.at, self.chosen, self.rank, self.ids, self.values, self._masses())
        for at, chosen, rank, ids, values, mass in zip(*(c.tolist() for c in columns), strict=True):
            top = tuple(pair for pair in zip(ids, values, strict=True) if pair[0] != NO_TOKEN)
            yield at, TokenLogprob(chosen, rank, top, mass if mass == mass else None)

    def _masses(self) -> Float32Array:
        if self.kept_mass is None:
            return np.full(len(self.at), np.nan, np.float32)
        return self.kept_mass

    @classmethod
    def joined(cls, parts: "Sequence[Logprobs]") -> "Logprobs":
        """All of them in order; where K differs, the rest is NO_TOKEN and -inf."""
        if len(parts) == 1:
            return parts[0]
        widest = max(part.ids.shape[1] for part in parts)
        widths = [((0, 0), (0, widest - part.ids.shape[1])) for part in parts]
        pairs = list(zip(parts, widths, strict=True))
        return cls(
            np.concatenate([part.at for part in parts]),
            np.concatenate([part.chosen for part in parts]),
            np.concatenate([part.rank for part in parts]),
            np.concatenate([np.pad(p.ids, w, constant_values=NO_TOKEN) for p, w in pairs]),
            np.concatenate([np.pad(p.values, w, constant_values=-np.inf) for p, w in pairs]),
            None
            if all(part.kept_mass is None for part in parts)
            else np.concatenate([part._masses() for part in parts]),
        )


@dataclass(slots=True)
class StepResult:
    """What a step gave: W or fewer tokens of each row, then NO_TOKEN.

    A row samples a token in each decode step of the call until it ends, and one more for each guess
    that was right.
    """

    epoch: int
    step: int
    tokens: Int32Array  # [R, W]
    errors: dict[int, RequestFailed] = field(default_factory=dict)  # row -> why it alone failed
    seconds: float = 0.0  # time in the runner
    num_steps: int = 1  # decode steps that ran: fewer than granted if all rows end early
    out_of_memory: bool = False  # it had to be computed in parts
    logprobs: Logprobs | None = None  # of the rows that ask; ``at`` is row * W + column
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by row; ``at`` is the
    # prompt position [1, P) of the token
    usage: list[PartUsage] = field(default_factory=list)  # of features that have news
    vectors: dict[int, Float32Array] = field(default_factory=dict)  # by row: [D], or [P, D] of a
    # task for each token; of rows whose prompt ends here and that sample nothing

    @property
    def seconds_apart(self) -> float:
        """The part of ``seconds`` that its tokens do not explain."""
        return sum(usage.seconds_apart for usage in self.usage)

    @property
    def num_tokens(self) -> Int64Array:
        """[R] tokens that each row sampled."""
        counts: Int64Array = np.count_nonzero(self.tokens >= 0, axis=1)
        return counts


@dataclass(slots=True, frozen=True)
class Hypothesis:
    """One result of a beam search."""

    tokens: list[int]
    score: float  # log probability / length ** length_penalty
    finish_reason: str  # "stop" or "length"


@dataclass(slots=True)
class Ended:
    """The end of one request."""

    key: int
    finish_reason: str  # "stop", "length", "repetition", "abort", "error"
    stop_reason: int | str | None = None  # a stop token's id, or words about a repetition
    error: RayfinError | None = None
    cached_tokens: int = 0  # prompt tokens that were not computed
    hypotheses: list[Hypothesis] = field(default_factory=list)  # of a beam search, best first
    deaths: int = 0  # of runners that had it in flight, of which it has not been cleared
    queued: float = 0.0  # seconds from its arrival here until it was admitted
    first_token: float | None = None  # and to its first token, if there was one
    vector: Float32Array | None = None  # of a request that samples nothing


class Begun(NamedTuple):
    """What is known of a request with its first token."""

    queued: float  # seconds from its arrival until it was admitted ...
    first_token: float | None  # ... and to the first token
    cached_tokens: int  # prompt tokens that were not computed


@dataclass(slots=True)
class TokenDeltas:
    """One step's output for one client: ``tokens[i]`` belongs to its request ``keys[i]``."""

    epoch: int
    step: int
    keys: Int64Array  # [N]
    tokens: Int32Array  # [N]
    ended: list[Ended] = field(default_factory=list)
    logprobs: Logprobs | None = None  # ``at`` is an index of ``tokens``
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)  # by key
    begun: dict[int, Begun] = field(default_factory=dict)  # by key, of requests that are ``timed``
    stats: EngineStats | None = None  # in a heartbeat
    held: Digests | None = None  # there too: of all pages in the cache, sorted; None: too many
    weights: str = ""  # the label of the version that made the tokens
    kept: frozenset[int] = frozenset()  # keys whose tokens see keys and values of other versions

    @classmethod
    def only(cls, *ended: Ended) -> "TokenDeltas":
        """A message outside of any step."""
        return cls(NO_STEP, NO_STEP, np.zeros(0, np.int64), np.zeros(0, np.int32), list(ended))


@dataclass(slots=True, frozen=True)
class TokenLogprob:
    """One token's log probability, its rank (1 is the likeliest), and the likeliest tokens'."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()  # (token id, log probability), likeliest first
    kept_mass: float | None = None  # of what filters left; None: it is of raw logits


@dataclass(slots=True)
class TokenDelta:
    """One request's part of a TokenDeltas."""

    request_id: str
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0  # prompt tokens that were not computed
    logprobs: list[TokenLogprob] | None = None  # one for each token, if requested
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by prompt position
    hypotheses: list[Hypothesis] = field(default_factory=list)  # of a beam search, best first
    queued: float = 0.0  # seconds, in the last delta: until its engine admitted it ...
    first_token: float | None = None  # ... and until it had its first token, if there was one;
    # of requests that are ``timed`` both, and cached_tokens, are in the first delta too
    vector: Float32Array | None = None  # of a request that samples nothing, in its only delta
    weights: str = ""  # TokenDeltas.weights
    kept: bool = False  # its tokens see keys and values of other versions


@dataclass(slots=True, frozen=True)
class TokenLog:
    """A request's tokens, which its engine keeps for a while after its end."""

    receipt: Receipt
    seed: int
    tokens: list[int]
    finish_reason: str | None = None  # None: it had not finished
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    spans: Spans = ()  # versions of the tokens


@dataclass(slots=True, frozen=True)
class EngineInfo:
    """The limits of an engine, against which an ingress checks requests."""

    name: str
    max_model_len: int
    vocab_size: int
    num_pages: int  # of all layers; where some see windows: of requests at their full length
    page_size: int
    page_bytes: int = 0  # of all layers
    memory_bytes: int = 0  # that a runner takes at most, with its pages; 0: not measured
    max_logprobs: int = 20  # -1: as many as the vocabulary has tokens
    logprobs_mode: LogprobsMode = "raw_logprobs"  # of requests that name none
    identity: str = ""  # EngineArgs.identity
    prefix_caching: bool = True
    parts: tuple[PartFacts, ...] = ()  # what its model has beside a decoder
    uncut: Bidirectional = Bidirectional()  # parts of prompts that no step cuts
    max_rows: int = 256  # of a step

    @classmethod
    def of(cls, name: str, config: "EngineConfig", identity: str = "") -> "EngineInfo":
        """Returns the limits of an engine that runs with ``config``."""
        return cls(
            name=name,
            max_model_len=config.max_model_len,
            vocab_size=config.vocab_size,
            num_pages=(pages := config.capacity // config.page_size),
            page_size=config.page_size,
            page_bytes=config.num_pages * config.page_bytes // max(pages, 1),
            memory_bytes=config.memory_bytes,
            max_logprobs=config.max_logprobs,
            logprobs_mode=config.logprobs_mode,
            prefix_caching=config.prefix_caching,
            parts=config.parts,
            uncut=config.uncut,
            max_rows=config.limits.max_decoding_batch,
            identity=identity,
        )

    def part(self, kind: type[P]) -> P | None:
        """Returns the facts of a kind, or None."""
        return first_of(self.parts, kind) if self.parts else None


@dataclass(slots=True, frozen=True)
class Seat:
    """What an engine gives to a client that attaches."""

    group: str  # the concurrency group of its subscription
    # Of a socket on the engine's machine, with a token for one connection; empty where it has none.
    address: str = ""


class Command(StrEnum):
    """An operator's command to an engine, carried out between two of its steps."""

    DRAIN = "drain"  # accepts no more requests; those that it has may finish
    ADMIT = "admit"  # accepts requests again
    RESET_CACHE = "reset_cache"  # forgets the content of free pages
    SLEEP = "sleep"  # frees the memory of its pages; its requests wait
    SLEEP_DEEP = "sleep_deep"  # frees the model's too
    LOAD = "load"  # ends that: the model is there, and pages are not
    WAKE = "wake"

    @property
    def seconds(self) -> float:
        """How long an engine may take."""
        loads = self in (Command.LOAD, Command.WAKE)
        return MODEL_LOAD_SECONDS if loads else LOOP_COMMAND_SECONDS
