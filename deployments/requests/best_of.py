"""``best_of``: more choices run than are asked for, and the likeliest ones are given back.

OpenAI's rule for completions: those with the highest log probability per token, best first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rayfin.actors.messages import EngineRequest, TokenDelta
from rayfin.actors.sampling_params import SamplingParams


@dataclass(slots=True)
class Likelihood:
    """How likely the model finds a choice's tokens, as its log probabilities come in."""

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


def num_candidates(params: SamplingParams) -> int:
    """Choices that run."""
    return params.best_of or params.n


def candidates(params: SamplingParams) -> SamplingParams:
    """The settings that all of them run with."""
    return replace(params, n=num_candidates(params), best_of=None)


def tell_logprobs(requests: Iterable[EngineRequest]) -> None:
    """Has the engine tell each token's log probability, where the caller asks for none."""
    for request in requests:
        if request.sampling.logprobs is None:
            request.sampling = replace(request.sampling, logprobs=0)


def likeliest(likelihoods: Sequence[Likelihood], n: int) -> list[int]:
    """The indices of the ``n`` likeliest, best first; the earlier one first among equals."""
    order = sorted(range(len(likelihoods)), key=lambda i: -likelihoods[i].per_token)
    return order[:n]
