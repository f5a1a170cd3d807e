"""``best_of``: runs more choices than ``n``, and returns the likeliest.

OpenAI's rule for completions: the highest log probability per token, best first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rayfin.actors.messages import EngineRequest, TokenDelta
from rayfin.actors.sampling_params import SamplingParams


@dataclass(slots=True)
class Likelihood:
    """A choice's log probability so far."""

    logprob: float = 0.0
    tokens: int = 0

    def add(self, delta: TokenDelta, spoken: int) -> None:
        """Counts the first ``spoken`` tokens of ``delta``: those past a stop string are dropped."""
        for entry in (delta.logprobs or [])[:spoken]:
            self.logprob += entry.logprob
            self.tokens += 1

    @property
    def per_token(self) -> float:
        return self.logprob / self.tokens if self.tokens else float("-inf")


def candidates(params: SamplingParams) -> SamplingParams:
    """Returns the settings of all choices that run."""
    return replace(params, n=params.best_of or params.n, best_of=None)


def request_logprobs(requests: Iterable[EngineRequest]) -> None:
    """Requests each token's log probability from the engine, if the caller does not."""
    for request in requests:
        if request.sampling.logprobs is None:
            request.sampling = replace(request.sampling, logprobs=0, processed=False)


def likeliest(likelihoods: Sequence[Likelihood], n: int) -> list[int]:
    """Returns the indices of the ``n`` likeliest, best first; among equals the earlier one."""
    order = sorted(range(len(likelihoods)), key=lambda i: -likelihoods[i].per_token)
    return order[:n]
