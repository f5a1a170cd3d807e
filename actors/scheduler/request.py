"""A live request of the scheduler."""

from dataclasses import dataclass, field

import numpy as np

from rayfin.actors.messages import EngineRequest, Int32Array
from rayfin.actors.scheduler.beam_search import BeamSearch
from rayfin.actors.weights.spans import Spans, VersionSpan, joined
from rayfin.cache.prefix_index import HashChain


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its output. Its tokens are in the RunningTable while it holds a slot.

    ``output`` [tokens] is the token log up to the last preemption; with the prompt it is all that a
    recomputation needs. It is an array because a list takes forty bytes for a token.
    """

    source: EngineRequest
    order: int  # arrival number in this engine
    arrival: float  # seconds of the engine's clock
    chain: HashChain  # hashes of its full pages, computed on demand
    output: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    slots: list[int] = field(default_factory=list)  # none while it waits
    next_prompt_logprob: int = field(init=False)  # prompt position that is scored next
    cached_tokens: int = 0  # prompt tokens found in the cache at the first admission
    admitted_at: float | None = None  # first admission, same clock
    first_token_at: float | None = None  # end of its prompt, same clock
    preemptions: int = 0  # for want of pages
    ended: bool = False
    deaths: int = 0  # of runners that had it in flight, since it was last cleared ...
    deaths_on_trial: int = 0  # ... and of those, during its trials
    fork_parent: "Request | None" = None  # an earlier choice of the same prompt
    search: BeamSearch | None = None  # of a running beam search
    mixed: bool = False  # its pages are of several versions of the weights, and not shared
    spans: Spans = ()  # versions of its tokens up to the last change of weights

    def __post_init__(self) -> None:
        self.next_prompt_logprob = self.source.sampling.prompt_logprob_start + 1

    @property
    def admitted(self) -> bool:
        """Whether it holds a slot or has held one."""
        return self.admitted_at is not None

    @property
    def slot(self) -> int | None:
        """Its first slot, or None while it waits."""
        return self.slots[0] if self.slots else None

    @property
    def width(self) -> int:
        """Slots that it needs to run."""
        return 1 if self.source.beams is None else self.source.beams.width

    @property
    def scoring(self) -> bool:
        """Whether prompt log probabilities are missing, so that the prompt must be computed."""
        wanted = self.source.sampling.prompt_logprobs is not None
        return wanted and self.next_prompt_logprob < len(self.source.prompt)

    @property
    def computes_all(self) -> bool:
        """Whether all tokens of its prompt are computed, none taken from the cache."""
        parts = self.source.parts
        return bool(parts) and any(part.computes_all for part in parts)

    @property
    def num_tokens(self) -> int:
        """Known tokens, while the request waits."""
        return len(self.source.prompt) + len(self.output)

    def spans_up_to(self, tokens: int, label: str) -> Spans:
        """The versions of its first ``tokens`` of output, of which ``label`` made the last."""
        known = sum(span.tokens for span in self.spans)
        return joined((*self.spans, VersionSpan(label, tokens - known, self.mixed)))

    def waits(self, now: float) -> tuple[float, float | None]:
        """Seconds from its arrival to its admission, or ``now``; and to its first token, if any."""
        admitted, first = self.admitted_at, self.first_token_at
        queued = (now if admitted is None else admitted) - self.arrival
        return queued, None if first is None else first - self.arrival

    def tokens(self) -> Int32Array:
        """Prompt and known output, while the request waits."""
        return np.concatenate([self.source.prompt, self.output])
