"""A request as the scheduler knows it while it lives."""

from dataclasses import dataclass, field

import numpy as np

from rayfin.actors.messages import EngineRequest, Int32Array
from rayfin.actors.scheduler.state.beam_search import BeamSearch
from rayfin.cache.prefix_index import HashChain


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and its output. Its tokens are in the RunningTable while it holds a slot.

    ``output`` [tokens] is the token log up to the last preemption; with the prompt it is all that a
    recomputation needs. An array: as a list, a token takes forty bytes, and all that run become
    lists at once when their runner dies.
    """

    source: EngineRequest
    order: int  # arrival number in this engine
    arrival: float  # when it came, seconds of the engine's clock
    chain: HashChain  # hashes of its full pages, as far as they were needed
    output: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    slots: list[int] = field(default_factory=list)  # that it holds; none while it waits
    prompt_told: int = 1  # first prompt position whose log probability has yet to be handed out
    cached_tokens: int = 0  # prompt tokens found in the cache at the first admission
    admitted_at: float | None = None  # when it first left the queue to run, same clock
    first_token_at: float | None = None  # when its prompt had come to its end, same clock
    preemptions: int = 0  # for want of pages
    ended: bool = False
    deaths: int = 0  # of runners that had it in flight, since it was last cleared of suspicion ...
    deaths_on_trial: int = 0  # ... and of those, while it was on trial
    fork_parent: "Request | None" = None  # an earlier choice of the same prompt
    search: BeamSearch | None = None  # of a beam search that has begun

    @property
    def admitted(self) -> bool:
        """Whether it holds a slot or has held one."""
        return self.admitted_at is not None

    @property
    def slot(self) -> int | None:
        """Its slot, the first one where it holds several; None while it waits."""
        return self.slots[0] if self.slots else None

    @property
    def width(self) -> int:
        """Slots that it takes to run."""
        return 1 if self.source.beams is None else self.source.beams.width

    @property
    def scoring(self) -> bool:
        """Whether log probabilities of the prompt are missing: it must be computed for them."""
        wanted = self.source.sampling.prompt_logprobs is not None
        return wanted and self.prompt_told < len(self.source.prompt)

    @property
    def num_tokens(self) -> int:
        """Known tokens, while the request waits."""
        return len(self.source.prompt) + len(self.output)

    def tokens(self) -> Int32Array:
        """Prompt and known output, while the request waits."""
        return np.concatenate([self.source.prompt, self.output])
