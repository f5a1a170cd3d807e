"""A running server from a client's side: its address, its model, its streams."""

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from rayfin.actors.errors import InvalidConfig, ServerError

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0  # a first token may wait for a full queue
BROKEN_OFF = "the stream broke off before its end"


@dataclass(slots=True)
class StreamPiece:
    """What one event of a stream says."""

    text: str = ""
    finish_reason: str | None = None
    completion_tokens: int | None = None  # the whole answer's, in the event that counts them
    done: bool = False  # the stream's last event


def client_settings(url: str, api_key: str | None) -> dict[str, Any]:
    """Keywords of httpx's clients for a server; a bare address gets ``/v1``.

    Raises:
        InvalidConfig: an address that is none.
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


def find_model(client: httpx.Client, wanted: str | None) -> str:
    """The model to ask for: ``wanted``, or the first one that the server offers.

    Raises:
        ServerError: nothing answers there, or no OpenAI server.
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
        offered = [str(card["id"]) for card in response.json()["data"]]
        return wanted or offered[0]
    except (ValueError, LookupError, TypeError):
        raise ServerError(f"{address} is no OpenAI API with a model") from None


def chat_body(model: str, messages: list[dict[str, str]], sampling: dict[str, Any]) -> Any:
    """The body of a streaming chat completion."""
    counted = {"include_usage": True}
    return {
        "model": model,
        "messages": messages,
        "stream": True,
        "stream_options": counted,
        **sampling,
    }


def read_event(line: str) -> StreamPiece | None:
    """A line of a server-sent event stream; None if it carries nothing.

    Raises:
        ServerError: the server reports that the answer failed.
    """
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return StreamPiece(done=True)
    try:
        event = json.loads(data)
        if "error" in event:
            raise ServerError(str(event["error"]["message"]))
        piece = StreamPiece(completion_tokens=(event.get("usage") or {}).get("completion_tokens"))
        for choice in event["choices"]:
            piece.text += choice["delta"].get("content") or ""
            piece.finish_reason = choice.get("finish_reason")
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ServerError(f"not an event of a chat completion: {data[:80]}") from None
    return piece


def refusal(response: httpx.Response) -> ServerError:
    """The error of a response that was read."""
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.text.strip()[:200] or response.reason_phrase
    return ServerError(f"HTTP {response.status_code}: {message}")


def describe(error: httpx.HTTPError) -> str:
    """One line for an error of the connection."""
    if isinstance(error, httpx.ConnectError):
        return "cannot connect"
    if isinstance(error, httpx.TimeoutException):
        return f"timed out ({type(error).__name__})"
    return f"the connection broke off ({type(error).__name__})"
