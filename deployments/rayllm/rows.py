"""Rows of a dataset and the lines of a batch: a row becomes a request, its answer new columns."""

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.batches.answers import LineAnswer
from rayfin.deployments.batches.lines import Line
from rayfin.deployments.rayllm.data_config import RayfinConfig, Task

Row = dict[str, Any]

ADAPTER = "lora"
SETTINGS = ("sampling_params", ADAPTER)
INPUTS: dict[Task, tuple[str, ...]] = {
    "generate": ("messages", "prompt", "prompt_token_ids", *SETTINGS),
    "embed": ("messages", "prompt", "prompt_token_ids", *SETTINGS),
    "classify": ("prompt", "prompt_token_ids", *SETTINGS),
    "score": ("text_1", "text_2", *SETTINGS),
}
"""The columns that a task reads; the first one of the inputs that a row has is taken."""

OUTPUTS: dict[Task, tuple[str, ...]] = {
    "generate": (
        *("generated_text", "token_ids", "finish_reason", "reasoning", "tool_calls"),
        *("num_input_tokens", "num_generated_tokens", "error"),
    ),
    "embed": ("embedding", "num_input_tokens", "error"),
    "classify": ("label", "probs", "num_input_tokens", "error"),
    "score": ("score", "num_input_tokens", "error"),
}
"""The columns that a task adds, in this order; all may be null."""

FIXED = frozenset({"model", "messages", "prompt", "input", "stream", "stream_options"})
"""Members of a body that ``sampling_params`` cannot set."""


class RowReader:
    """Makes lines of rows and columns of answers, for one config."""

    def __init__(self, config: RayfinConfig) -> None:
        self._config = config

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it reads, where a dataset has them."""
        key = () if self._config.row_id is None else (self._config.row_id,)
        return (*INPUTS[self._config.task], *key)

    def lines(self, rows: Sequence[Row]) -> list[Line | LineAnswer]:
        """The request of each row, or the error of one that is none.

        Equal rows of a batch have seeds of their own, by their order.
        """
        seen: Counter[str] = Counter()
        lines: list[Line | LineAnswer] = []
        for place, row in enumerate(rows):
            row = without_nulls(row)
            key = _digest(row)
            seen[key] += 1
            name = f"{key}-{seen[key]}"
            try:
                url, body = self._body(row)
                lines.append(Line(place + 1, name, url, body))
            except InvalidRequest as error:
                lines.append(LineAnswer(name, place + 1, error={"message": error.message}))
        return lines

    def outputs(self, answers: Iterable[LineAnswer]) -> list[Row]:
        """The new columns of each row."""
        return [self._output(answer) for answer in answers]

    def _body(self, row: Row) -> tuple[str, Row]:
        config = self._config
        asked = {**config.sampling_params, **_settings(row)}
        if fixed := FIXED & asked.keys():
            shown = ", ".join(sorted(fixed))
            raise InvalidRequest(f"sampling_params must not have {shown}", "sampling_params")
        if asked.get("n", 1) != 1:
            raise InvalidRequest("sampling_params: n must be 1, a row has one text", "n")
        body = {**asked, "model": row.get(ADAPTER, config.model)}
        if config.task == "score":
            return "/score", body | {name: _needed(row, name) for name in ("text_1", "text_2")}
        field = next((name for name in INPUTS[config.task] if name in row), None)
        if field is None or field in SETTINGS:
            names = [name for name in INPUTS[config.task] if name not in SETTINGS]
            raise InvalidRequest(f"the row needs one of {', '.join(names)}")
        value = row[field]
        if config.task == "classify":
            return "/classify", body | {"input": value}
        if config.task == "embed":
            place = "messages" if field == "messages" else "input"
            return "/v1/embeddings", body | {place: value, "encoding_format": "base64"}
        body["return_token_ids"] = True
        if field == "messages":
            return "/v1/chat/completions", body | {"messages": value}
        return "/v1/completions", body | {"prompt": value}

    def _output(self, answer: LineAnswer) -> Row:
        names = OUTPUTS[self._config.task]
        row: Row = dict.fromkeys(names)
        if not answer.ok:
            row["error"] = _error(answer)
            return row
        body = answer.body
        usage = body.get("usage") or {}
        row["num_input_tokens"] = usage.get("prompt_tokens")
        if self._config.task == "generate":
            row.update(_generated(body["choices"][0]))
            row["num_generated_tokens"] = usage.get("completion_tokens")
            return row
        (first,) = body["data"]
        if self._config.task == "embed":
            row["embedding"] = np.frombuffer(base64.b64decode(first["embedding"]), "<f4")
        else:
            row.update({name: first[name] for name in names if name in first})
        return row


def without_nulls(value: Any) -> Any:
    """A value without the null members of its objects.

    A table gives all its rows the same members, and those that a row lacks are null.
    """
    if isinstance(value, Mapping):
        return {
            str(name): without_nulls(member) for name, member in value.items() if member is not None
        }
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [without_nulls(element) for element in value]
    return value.item() if isinstance(value, np.generic) else value


def _settings(row: Row) -> Row:
    settings = row.get("sampling_params", {})
    if not isinstance(settings, dict):
        raise InvalidRequest("sampling_params must be an object", "sampling_params")
    return settings


def _needed(row: Row, name: str) -> Any:
    if name not in row:
        raise InvalidRequest(f"the row has no {name}", name)
    return row[name]


def _digest(row: Row) -> str:
    """What a seed is made of: the same for a row that is computed again, anywhere."""
    text = json.dumps(row, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _generated(choice: Row) -> Row:
    message = choice.get("message") or {"content": choice.get("text")}
    calls = message.get("tool_calls")
    return {
        "generated_text": message.get("content") or "",
        "token_ids": choice.get("token_ids"),
        "finish_reason": choice.get("finish_reason"),
        "reasoning": message.get("reasoning") or message.get("reasoning_content"),
        "tool_calls": json.dumps(calls, ensure_ascii=False) if calls else None,
    }


def _error(answer: LineAnswer) -> str:
    error = answer.error or (answer.body.get("error") if isinstance(answer.body, dict) else None)
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return f"status {answer.status}: {str(answer.body)[:200]}"
