"""Log probabilities in the shapes of the three places where OpenAI and vLLM put them."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from pydantic import BaseModel

from rayfin.actors.messages import TokenLogprob
from rayfin.actors.sampling_params import WHOLE_VOCABULARY
from rayfin.deployments.text.logprobs import by_token, of_prompt
from rayfin.deployments.text.tokenizer import Tokenizer

LOWEST = -9999.0  # stands for minus infinity, which JSON has not


class CompletionLogprobs(BaseModel):
    """Of a completion: one entry per token in every list."""

    text_offset: list[int]  # characters of the text before the token
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]  # the token's own is always among them

    def then(self, other: "CompletionLogprobs") -> "CompletionLogprobs":
        return CompletionLogprobs(
            text_offset=self.text_offset + other.text_offset,
            token_logprobs=self.token_logprobs + other.token_logprobs,
            tokens=self.tokens + other.tokens,
            top_logprobs=self.top_logprobs + other.top_logprobs,
        )


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(BaseModel):
    """As vLLM tells of a prompt's tokens, by token id."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class LogprobsWriter:
    """Writes what one request asks for.

    Args:
        asked: for how many of the likeliest tokens beside each one; -1 for all.
        as_ids: tokens are named ``token_id:7`` (``return_tokens_as_token_ids``).
    """

    def __init__(self, tokenizer: Tokenizer, asked: int | None, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._most = _most(asked)
        self._as_ids = as_ids

    def completion(
        self, ids: Sequence[int], told: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> CompletionLogprobs:
        """Of ``ids``, with the characters of the text before each."""
        return CompletionLogprobs(
            text_offset=list(offsets),
            token_logprobs=[None if own is None else _finite(own.logprob) for own in told],
            tokens=[self._name(token) for token in ids],
            top_logprobs=[
                None if own is None else self._top(token, own)
                for token, own in zip(ids, told, strict=True)
            ],
        )

    def echo(
        self, ids: Sequence[int], told: Mapping[int, TokenLogprob], text: str
    ) -> CompletionLogprobs:
        """Of the ids of a prompt that is echoed as ``text``; nothing is told of the first one.

        Tokens that are put before a text are no part of it: its end is where they agree.
        """
        lengths = list(self._lengths(ids))
        start = len(text) - sum(lengths)
        offsets = [max(0, start + before) for before in accumulate(lengths[:-1], initial=0)]
        return self.completion(ids, [told.get(i) for i in range(len(ids))], offsets)

    def _lengths(self, ids: Sequence[int]) -> Iterator[int]:
        detokenizer = self._tokenizer.detokenizer((), skip_special_tokens=False)
        for token in ids:
            yield len(detokenizer.push([token]))

    def chat(self, ids: Sequence[int], told: Sequence[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                ChatTokenLogprob(
                    token=self._name(token),
                    logprob=_finite(own.logprob),
                    bytes=list(self._tokenizer.token_bytes(token)),
                    top_logprobs=[
                        TopLogprob(
                            token=self._name(other),
                            logprob=_finite(logprob),
                            bytes=list(self._tokenizer.token_bytes(other)),
                        )
                        for other, logprob in own.top[: self._most]
                    ],
                )
                for token, own in zip(ids, told, strict=True)
            ]
        )

    def _top(self, token: int, own: TokenLogprob) -> dict[str, float]:
        named: dict[str, float] = {}
        for other, told in by_token(token, own, self._most, None).items():
            named.setdefault(self._name(other), _finite(told.logprob))  # two may have one text
        return named

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)


def prompt_logprobs(
    ids: Sequence[int], told: Mapping[int, TokenLogprob], asked: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    """Of a whole prompt: its first token has none."""
    return [
        None
        if entry is None
        else {
            token: PromptLogprob(
                logprob=_finite(own.logprob), rank=own.rank, decoded_token=own.decoded_token
            )
            for token, own in entry.items()
        }
        for entry in of_prompt(ids, told, _most(asked), tokenizer)
    ]


def _most(asked: int | None) -> int:
    return sys.maxsize if asked == WHOLE_VOCABULARY else asked or 0


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
