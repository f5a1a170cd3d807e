"""A client's side of a running server: its address, its models, and its event streams."""

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from rayfin.actors.errors import InvalidConfig, ServerError

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0  # a first token may wait for a full queue
DONE = "[DONE]"
BROKEN_OFF = "the stream broke off before its end"


@dataclass(slots=True)
class StreamPiece:
    """One event of a completion's or a chat completion's stream."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None  # of the whole answer so far, where the event counts them
    prompt_tokens: int | None = None  # where the event counts them, ...
    cached_tokens: int | None = None  # ... and those that were cached
    usage_only: bool = False  # an event without choices


def client_settings(url: str, api_key: str | None) -> dict[str, Any]:
    """Keyword arguments of httpx's clients for a server; an address without a path gets ``/v1``.

    Raises:
        InvalidConfig: the URL is malformed.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidConfig(f"url must look like http://127.0.0.1:8000/v1, got {url!r}", "url")
    path = parts.path.rstrip("/") or "/v1"
    return {
        "base_url": parts._replace(path=path).geturl(),
        "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
        "timeout": httpx.Timeout(CONNECT_SECONDS, read=READ_SECONDS),
    }


def find_model(client: httpx.Client, model: str | None) -> str:
    """Returns ``model``, or the first model that the server lists.

    Raises:
        ServerError: no server answers, or it is not an OpenAI server.
    """
    address = str(client.base_url).rstrip("/")
    try:
        response = client.get("/models")
    except httpx.ConnectError:
        raise ServerError(f"no server answers at {address}; `rayfin serve` starts one") from None
    except httpx.HTTPError as error:
        raise ServerError(f"{address}: {describe(error)}") from None
    if response.is_error:
        raise refusal(response)
    try:
        listed = [str(card["id"]) for card in response.json()["data"]]
        return model or listed[0]
    except (ValueError, LookupError, TypeError):
        raise ServerError(f"{address} is not an OpenAI API with a model") from None


def context_length(client: httpx.Client, model: str) -> int | None:
    """The most tokens of a request of ``model``, where the server tells (``max_model_len``)."""
    try:
        cards = client.get("/models").json()["data"]
        lengths = [card.get("max_model_len") for card in cards if card["id"] == model]
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return lengths[0] if lengths and isinstance(lengths[0], int) else None


def chat_body(
    model: str, messages: list[dict[str, str]], sampling: dict[str, Any]
) -> dict[str, Any]:
    """The body of a streaming chat completion."""
    return {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling,
    }


async def stream_pieces(
    client: httpx.AsyncClient,
    path: str,
    body: dict[str, Any],
    headers: dict[str, str] | None = None,
) -> AsyncIterator[StreamPiece]:
    """Posts a request and yields its events.

    Raises:
        ServerError: the server refuses, reports an error, or the stream breaks off.
    """
    with connection_errors():
        async with client.stream("POST", path, json=body, headers=headers) as response:
            if response.is_error:
                await response.aread()
                raise refusal(response)
            async for line in response.aiter_lines():
                if (data := event_data(line)) is None:
                    continue
                if data == DONE:
                    return
                yield read_piece(data)
    raise ServerError(BROKEN_OFF)


def event_data(line: str) -> str | None:
    """The data of a server-sent event's line, or None for a comment or another field."""
    return line.removeprefix("data:").strip() if line.startswith("data:") else None


def read_piece(data: str) -> StreamPiece:
    """Parses an event's data.

    Raises:
        ServerError: the event reports an error, or is not a completion's.
    """
    try:
        event = json.loads(data)
        if "error" in event:
            raise ServerError(str(event["error"]["message"]))
        usage = event.get("usage") or {}
        piece = StreamPiece(
            completion_tokens=usage.get("completion_tokens"),
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            usage_only=not event["choices"],
        )
        for choice in event["choices"]:
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            piece.text += text or ""
            piece.reasoning += _reasoning(choice.get("delta", {}))
            piece.finish_reason = choice.get("finish_reason")
        return piece
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ServerError(f"invalid event in the stream: {data[:80]}") from None


def _reasoning(delta: dict[str, Any]) -> str:
    """What a delta says of the model's reasoning, in the field that the server has for it."""
    return delta.get("reasoning") or delta.get("reasoning_content") or ""


def refusal(response: httpx.Response) -> ServerError:
    """The error of a response whose body has been read."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.text.strip()[:200] or response.reason_phrase
    return ServerError(f"HTTP {response.status_code}: {message}")


@contextmanager
def connection_errors() -> Iterator[None]:
    """Raises httpx's errors as a ServerError."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ServerError(describe(error)) from None


def describe(error: httpx.HTTPError) -> str:
    """One line for an error of the connection."""
    if isinstance(error, httpx.ConnectError):
        return "cannot connect"
    if isinstance(error, httpx.TimeoutException):
        return f"timed out ({type(error).__name__})"
    return f"the connection broke off ({type(error).__name__})"
