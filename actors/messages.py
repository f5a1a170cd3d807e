"""Everything that crosses an actor boundary, in the order in which one request meets it.

    ingress   ── EngineRequest ──►  scheduler     once per request (a list per call)
    scheduler ── SchedulerInfo ──►  runners       once per step, deltas only
    runner    ── StepResult ─────►  scheduler     once per step
    scheduler ── TokenDeltas ────►  ingress       once per step and ingress

Arrays are int32 NumPy in struct-of-arrays form: a step of 256 rows pickles in tens of
microseconds, a dict per request would take hundreds. No torch here: the control plane has none.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rayfin.actors.errors import RayfinError

Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

SAMPLED_LAST_STEP = -1
"""In ``merge_prompt``: the token that this request sampled last, which the runner knows."""

NO_TOKEN = -1
"""In ``last_pos`` and ``StepResult.tokens``: a chunk that ends mid-prompt samples nothing."""

NO_STEP = -1
"""Epoch and step of a message that belongs to none (a refusal at the door)."""


@dataclass(slots=True, frozen=True)
class Sampling:
    """What the runner needs to know to sample one request's tokens."""

    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    banned: tuple[int, ...] = ()  # token ids that may not be sampled ...
    banned_until: int = 0  # ... at positions of the request below this (min_tokens)


@dataclass(slots=True, frozen=True)
class StopRules:
    """When the scheduler ends a request; stop *strings* are the ingress' business."""

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()  # end of sequence included, unless ignored
    eos_token_ids: frozenset[int] = frozenset()  # of those, the ones not reported as stop_reason


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
    extra_keys: tuple[str, ...] = ()  # what keys and values depend on beside tokens: salt, adapter


@dataclass(slots=True)
class NewRequest:
    """First sight of a request by the runners (again after a preemption)."""

    handle: int
    sampling: Sampling
    cap: int  # most tokens of the request, prompt included: a lease ends there
    stop_token_ids: frozenset[int] = frozenset()  # and at these


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
    chunk_len: Int32Array  # [R]
    merge_prompt: Int32Array  # [T] token ids, or SAMPLED_LAST_STEP
    kv_len: Int32Array  # [R] tokens in the cache before this step
    kv_page_len: Int32Array  # [R] pages held for this step
    last_pos: Int32Array  # [R] index in the chunk whose logits are sampled, or NO_TOKEN
    is_decoding: BoolArray  # [R]
    decoding_batch: int
    prefill_batch: int
    new_pages: Int32Array  # [N] page ids appended this step, row after row
    new_pages_len: Int32Array  # [R] how many of them each row takes
    new_requests: list[NewRequest] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)  # handles to forget, before new_requests
    lease: int = 1  # decode steps granted

    def chunk_prompt(self, row: int) -> Int32Array:
        """The tokens of one row's chunk (the seed's ``chunk_prompts[row]``)."""
        start = int(self.chunk_idx[row])
        return self.merge_prompt[start : start + int(self.chunk_len[row])]


@dataclass(slots=True)
class StepResult:
    """What a step gave: ``tokens[i]`` for row i, NO_TOKEN where nothing was sampled.

    A lease of L steps gives L tokens; a row that ended early has NO_TOKEN from there on.
    """

    epoch: int
    step: int
    tokens: Int32Array  # [R, L]
    errors: dict[int, str] = field(default_factory=dict)  # row -> why that row alone failed
    seconds: float = 0.0  # time in the runner


@dataclass(slots=True)
class Ended:
    """The last word on one request."""

    key: int
    finish_reason: str  # "stop", "length", "abort", "error"
    stop_reason: int | None = None  # the stop token's id, when it was not end of sequence
    error: RayfinError | None = None
    cached_tokens: int = 0  # prompt tokens that were not computed


@dataclass(slots=True)
class TokenDeltas:
    """One step's news for one client: ``tokens[i]`` belongs to its request ``keys[i]``."""

    epoch: int
    step: int
    keys: Int64Array  # [N]
    tokens: Int32Array  # [N]
    ended: list[Ended] = field(default_factory=list)

    @classmethod
    def only(cls, ended: Ended) -> "TokenDeltas":
        """A message outside of any step."""
        return cls(NO_STEP, NO_STEP, np.zeros(0, np.int64), np.zeros(0, np.int32), [ended])


@dataclass(slots=True)
class TokenDelta:
    """One request's share of a TokenDeltas, as the client's demultiplexer hands it on."""

    request_id: str
    tokens: list[int]
    finish_reason: str | None = None
    stop_reason: int | None = None
    cached_tokens: int = 0  # prompt tokens that were not computed


@dataclass(slots=True, frozen=True)
class EngineInfo:
    """What an ingress must know about an engine to check requests at the door."""

    name: str
    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int


@dataclass(slots=True)
class EngineStats:
    """A snapshot of plain counters and gauges; the metrics hub and ``/health`` read it."""

    epoch: int = 0
    steps: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_held: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up in the prefix index, at first admissions
    prefix_hits: int = 0  # of those, tokens that were there
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests
    seconds_since_progress: float = 0.0  # 0 when idle
    last_step_seconds: float = 0.0
