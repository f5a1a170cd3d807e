"""Chunks of a stream as JSON text, in the shapes that vLLM sends.

A stream has a chunk for each step of each choice. So no object is made for a chunk: what all chunks
share is written once, and null keys are part of a literal. Only log probabilities are models.
"""

import json
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any

from pydantic import BaseModel

from rayfin.deployments.generation.usage import RequestMetrics, Usage

ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
EMPTY = "{}"  # the delta of tokens that are no text yet, or whose text is left out


class ChunkFrame:
    """What all chunks of one stream have in common.

    Args:
        kind: the chunks' ``object``.
        created: seconds since 1970.
    """

    def __init__(self, answer_id: str, kind: str, created: int, model: str) -> None:
        fields = {"id": answer_id, "object": kind, "created": created, "model": model}
        self._head = f'{dumped(fields)[:-1]},"choices":['

    def chunk(self, choice: str, usage: str = "", more: str = "") -> str:
        """Returns a chunk of one choice; ``usage`` and ``more`` are further members or empty."""
        return f"{self._head}{choice}]{usage}{more}}}"

    def last(self, usage: Usage, metrics: RequestMetrics | None) -> str:
        """Returns the chunk without choices at the end of a stream."""
        more = "" if metrics is None else f',"metrics":{metrics.model_dump_json(exclude_none=True)}'
        return f'{self._head}],"usage":{usage.model_dump_json(exclude_none=True)}{more}}}'


def chat_choice(index: int, delta: str) -> str:
    """Returns a choice that has a delta and nothing else."""
    return f'{{"index":{index},"delta":{delta},{NO_MORE}'


NO_MORE = '"logprobs":null,"finish_reason":null,"token_ids":null}'


def full_chat_choice(
    index: int,
    delta: str,
    logprobs: BaseModel | None,
    token_ids: Sequence[int] | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> str:
    end = f',"stop_reason":{dumped(stop_reason)}' if finish_reason else ""
    return (
        f'{{"index":{index},"delta":{delta},"logprobs":{_model(logprobs)},'
        f'"finish_reason":{dumped(finish_reason)}{end},"token_ids":{dumped(token_ids)}}}'
    )


def text_choice(
    index: int,
    text: str,
    logprobs: BaseModel | None,
    prompt_token_ids: Sequence[int] | None,
    token_ids: Sequence[int] | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
) -> str:
    """Returns a choice of a completion."""
    rich = not (logprobs is None and token_ids is None and prompt_token_ids is None)
    if finish_reason is None and not rich:
        return f'{{"index":{index},"text":{quoted(text)},{NO_MORE_TEXT}'
    return (
        f'{{"index":{index},"text":{quoted(text)},"logprobs":{_model(logprobs)},'
        f'"finish_reason":{dumped(finish_reason)},"stop_reason":{dumped(stop_reason)},'
        f'"prompt_token_ids":{dumped(prompt_token_ids)},"token_ids":{dumped(token_ids)}}}'
    )


NO_MORE_TEXT = (
    '"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,'
    '"token_ids":null}'
)


def usage_so_far(prompt: int, sent: int, details: str = "") -> str:
    """Returns the member ``usage`` of a chunk: its choice's tokens up to it."""
    return (
        f',"usage":{{"prompt_tokens":{prompt},"total_tokens":{prompt + sent},'
        f'"completion_tokens":{sent}{details}}}'
    )


def member(name: str, value: Any) -> str:
    """Returns a member that follows others."""
    return f',"{name}":{dumped(value)}'


def quoted(text: str) -> str:
    return encode_basestring(text)


def dumped(value: Any) -> str:
    return ENCODER.encode(value)


def _model(value: BaseModel | None) -> str:
    return "null" if value is None else value.model_dump_json()
