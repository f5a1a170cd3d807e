"""Log probabilities in the three shapes of OpenAI and vLLM."""

import sys
from collections.abc import Mapping, Sequence
from itertools import accumulate

from pydantic import BaseModel

from rayfin.actors.messages import TokenLogprob
from rayfin.actors.sampling_params import WHOLE_VOCABULARY
from rayfin.deployments.text.detokenizer import HALF
from rayfin.deployments.text.logprobs import by_token, of_prompt
from rayfin.deployments.text.tokenizer import Tokenizer

LOWEST = -9999.0  # minus infinity, which JSON does not have


class CompletionLogprobs(BaseModel):
    """Of a completion: one entry per token in every list."""

    text_offset: list[int]  # characters of the text before the token
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]  # by text; the token itself is always among them

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
    """One token of a prompt, as in vLLM."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class LogprobsWriter:
    """Writes the log probabilities of one request.

    Args:
        asked: number of top tokens per token; -1 for all.
        as_ids: tokens are named ``token_id:7`` (``return_tokens_as_token_ids``).
        named: ``asked`` does not count: the request names its tokens (``logprob_token_ids``). As
            in vLLM the token itself stands before them in a chat, too.
    """

    def __init__(
        self, tokenizer: Tokenizer, asked: int | None, as_ids: bool = False, named: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = sys.maxsize if named else _num_top(asked)
        self._as_ids = as_ids
        self._named = named

    def completion(
        self, ids: Sequence[int], entries: Sequence[TokenLogprob | None], offsets: Sequence[int]
    ) -> CompletionLogprobs:
        """Returns those of ``ids``; ``offsets`` count the characters before each token."""
        return CompletionLogprobs(
            text_offset=list(offsets),
            token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in entries],
            tokens=[self._key(token) for token in ids],
            top_logprobs=[
                None if entry is None else self._top(token, entry)
                for token, entry in zip(ids, entries, strict=True)
            ],
        )

    def echo(
        self, ids: Sequence[int], entries: Mapping[int, TokenLogprob], text: str
    ) -> CompletionLogprobs:
        """Returns those of a prompt that is echoed as ``text``; its first token has none.

        Special tokens before the text are not in it, so offsets are counted from the end.
        """
        lengths = self._lengths(ids)
        start = len(text) - sum(lengths)
        offsets = [max(0, start + before) for before in accumulate(lengths[:-1], initial=0)]
        return self.completion(ids, [entries.get(i) for i in range(len(ids))], offsets)

    def _lengths(self, ids: Sequence[int]) -> list[int]:
        """Returns the characters that each token completes; the last one ends the text."""
        detokenizer = self._tokenizer.detokenizer((), skip_special_tokens=False)
        lengths = [len(detokenizer.push([token])) for token in ids]
        lengths[-1] += len(detokenizer.finish())
        return lengths

    def chat(self, ids: Sequence[int], entries: Sequence[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs(
            content=[
                ChatTokenLogprob(
                    token=self._name(token),
                    logprob=_finite(entry.logprob),
                    bytes=list(self._tokenizer.token_bytes(token)),
                    top_logprobs=[
                        TopLogprob(
                            token=self._name(other),
                            logprob=_finite(logprob),
                            bytes=list(self._tokenizer.token_bytes(other)),
                        )
                        for other, logprob in self._top_of(token, entry)
                    ],
                )
                for token, entry in zip(ids, entries, strict=True)
            ]
        )

    def _top_of(self, token: int, entry: TokenLogprob) -> Sequence[tuple[int, float]]:
        if not self._named:
            return entry.top[: self._num_top]
        return list({token: entry.logprob, **dict(entry.top)}.items())

    def _top(self, token: int, entry: TokenLogprob) -> dict[str, float]:
        named: dict[str, float] = {}
        for other, score in by_token(token, entry, self._num_top, None).items():
            key, logprob = self._key(other), _finite(score.logprob)
            named[key] = max(logprob, named.get(key, logprob))  # two may have one text
        return named

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token_text(token)

    def _key(self, token: int) -> str:
        """Returns a name for a dict: bytes that are no text are written, as OpenAI does."""
        name = self._name(token)
        if HALF not in name:
            return name
        written = self._tokenizer.token_bytes(token)
        return name if written == name.encode() else f"bytes:{repr(written)[2:-1]}"


def prompt_logprobs(
    ids: Sequence[int], entries: Mapping[int, TokenLogprob], asked: int, tokenizer: Tokenizer
) -> PromptLogprobs:
    """Returns those of a whole prompt; its first token has none."""
    return [
        None
        if entry is None
        else {
            token: PromptLogprob(
                logprob=_finite(score.logprob), rank=score.rank, decoded_token=score.decoded_token
            )
            for token, score in entry.items()
        }
        for entry in of_prompt(ids, entries, _num_top(asked), tokenizer)
    ]


def _num_top(asked: int | None) -> int:
    return sys.maxsize if asked == WHOLE_VOCABULARY else asked or 0


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
