"""Log probabilities with the text of their tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayfin.actors.messages import TokenLogprob
from rayfin.deployments.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """One token's log probability; the names are vLLM's."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest
    decoded_token: str | None = None  # None without a tokenizer


def by_token(
    token: int, entry: TokenLogprob, most: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """Returns the log probabilities of ``token``, which comes first, and of the ``most`` likeliest.

    ``entry`` may hold more than ``most``.
    """

    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token)

    logprobs = {token: Logprob(entry.logprob, entry.rank, text(token))}
    for rank, (other, logprob) in enumerate(entry.top[:most], start=1):
        logprobs.setdefault(other, Logprob(logprob, rank, text(other)))
    return logprobs


def of_prompt(
    ids: Sequence[int],
    entries: Mapping[int, TokenLogprob],
    most: int,
    tokenizer: Tokenizer | None,
) -> list[dict[int, Logprob] | None]:
    """Returns those of each prompt token from ``entries`` by position; the first has none."""
    return [
        by_token(token, entries[position], most, tokenizer) if position in entries else None
        for position, token in enumerate(ids)
    ]


def total(entries: Iterable[TokenLogprob]) -> float:
    """Returns the log probability of all tokens together."""
    return sum(entry.logprob for entry in entries)
