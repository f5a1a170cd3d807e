"""Log probabilities with the words that belong to them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayfin.actors.messages import TokenLogprob
from rayfin.deployments.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """One token's; the names are vLLM's."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest
    decoded_token: str | None = None  # None without a tokenizer


def by_token(
    token: int, told: TokenLogprob, most: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """What was told of a token and of the ``most`` likeliest in its place: its own comes first.

    ``told`` may hold more than was asked for.
    """

    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token)

    found = {token: Logprob(told.logprob, told.rank, text(token))}
    for rank, (other, logprob) in enumerate(told.top[:most], start=1):
        found.setdefault(other, Logprob(logprob, rank, text(other)))
    return found


def of_prompt(
    ids: Sequence[int],
    told: Mapping[int, TokenLogprob],
    most: int,
    tokenizer: Tokenizer | None,
) -> list[dict[int, Logprob] | None]:
    """For each token of a prompt, from what was told by position; the first one has none."""
    return [
        by_token(token, told[position], most, tokenizer) if position in told else None
        for position, token in enumerate(ids)
    ]


def total(told: Iterable[TokenLogprob]) -> float:
    """The log probability of all the tokens together."""
    return sum(own.logprob for own in told)
