"""Log probabilities with the text of their tokens."""

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfin.actors.messages import Float32Array, TokenLogprob
from rayfin.deployments.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """One token's log probability; the names are vLLM's."""

    logprob: float
    rank: int | None = None  # 1 is the likeliest
    decoded_token: str | None = None  # None without a tokenizer


def by_token(
    token: int, entry: TokenLogprob, count: int, tokenizer: Tokenizer | None
) -> dict[int, Logprob]:
    """Returns the log probabilities of ``token``, which comes first, and the ``count`` likeliest.

    ``entry`` may hold more than ``count``.
    """

    def text(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token)

    logprobs = {token: Logprob(entry.logprob, entry.rank, text(token))}
    for rank, (other, logprob) in enumerate(entry.top[:count], start=1):
        logprobs.setdefault(other, Logprob(logprob, rank, text(other)))
    return logprobs


def of_prompt(
    ids: Sequence[int],
    entries: Mapping[int, TokenLogprob],
    count: int,
    tokenizer: Tokenizer | None,
) -> list[dict[int, Logprob] | None]:
    """Returns those of each prompt token from ``entries`` by position; the first has none."""
    return [
        by_token(token, entries[position], count, tokenizer) if position in entries else None
        for position, token in enumerate(ids)
    ]


def total(entries: Iterable[TokenLogprob]) -> float:
    """Returns the log probability of all tokens together."""
    return sum(entry.logprob for entry in entries)


def sampling_mask(entries: Iterable[TokenLogprob], top_k: int) -> list[list[int] | None]:
    """Returns for each token those that it was drawn from, likeliest first.

    It is None where more are as likely as the last of ``top_k`` than the engine has returned.
    """
    masks: list[list[int] | None] = []
    for entry in entries:
        mask = [token for token, logprob in entry.top if logprob > -math.inf]
        masks.append(None if len(mask) == len(entry.top) > top_k else mask)
    return masks


def kept_masses(entries: Iterable[TokenLogprob]) -> list[float] | None:
    """Returns for each token what filters left of the probabilities; None of raw logits."""
    masses = [entry.kept_mass for entry in entries]
    known = [mass for mass in masses if mass is not None]
    return known if len(known) == len(masses) else None


def given_scores(
    given: Sequence[Any], entries: Mapping[int, TokenLogprob], prompt_len: int
) -> Float32Array:
    """Returns the log probabilities [rows, K] of ``prompt_logprob_token_ids``.

    Args:
        given: the ids, a row for each of the last tokens of the prompt, or one for all.
        entries: by position in the prompt.
    """
    rows = given
    if not isinstance(given[0], Sequence):
        rows = [given] * (prompt_len - min(entries, default=prompt_len))
    first = prompt_len - len(rows)
    scores = np.full((len(rows), max(map(len, rows))), -np.inf, np.float32)
    for row, ids in enumerate(rows):
        known = dict(entries[first + row].top)
        scores[row, : len(ids)] = [known.get(token, -math.inf) for token in ids]
    return scores


def as_npy(scores: Float32Array) -> str:
    """Returns an array as a .npy file in base64, as vLLM does."""
    file = io.BytesIO()
    np.save(file, scores)
    return base64.b64encode(file.getvalue()).decode()
