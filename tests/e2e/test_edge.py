"""Bytes on a socket that no HTTP client would send, through Serve's own proxy."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

HOST = b"Host: rayfin\r\n"
JSON = b"Content-Type: application/json\r\n"
CHUNKED = JSON + b"Transfer-Encoding: chunked\r\n"


def talk(app: Any, data: bytes) -> tuple[int, dict[str, list[str]], bytes]:
    """Status, headers and body of the answer to ``data``."""
    address = urlsplit(app.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(data)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += _received(connection)
        head, _, body = answer.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers: dict[str, list[str]] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            headers.setdefault(name.lower(), []).append(value)
        for length in headers.get("content-length", ()):
            while len(body) < int(length):
                body += _received(connection)
    return int(first.split()[1]), headers, body


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    assert data, "the server closed the connection"
    return data


def request(line: bytes, headers: bytes = HOST) -> bytes:
    return line + b" HTTP/1.1\r\n" + headers + b"\r\n"


ODD: list[tuple[str, bytes, int, str]] = [  # row of the list, request, status, code
    ("6", request(b"GET /health", b""), 400, "invalid_request"),
    ("6", request(b"GET /health", b"Host: a/?x=\r\n"), 400, "invalid_request"),
    ("6", request(b"GET /health", b"Host: a/#\r\n"), 400, "invalid_request"),
    ("6", request(b"GET /health", HOST + HOST), 400, "invalid_request"),
    ("6", request(b"GET @evil"), 400, "invalid_request"),
    ("7", request(b"GET //health"), 404, "unknown_url"),
    ("7", request(b"GET //v1/models"), 404, "unknown_url"),
    ("7", request(b"GET /v1/../health"), 404, "unknown_url"),
    ("7", request(b"GET /%2fv1/models"), 404, "unknown_url"),
    ("7", request(b"GET /V1/models"), 404, "unknown_url"),
    ("7", request(b"GET /v1/models//"), 404, "model_not_found"),
    ("8", request(b"DELETE /health"), 405, "method_not_allowed"),
    ("8", request(b"GET /v1/completions"), 405, "method_not_allowed"),
    ("8", request(b"FOO /health"), 400, "invalid_request"),
    ("8", request(b"PROPFIND /health"), 400, "invalid_request"),
    ("9", request(b"GET /nowhere"), 404, "unknown_url"),
    ("24", request(b"POST /v1/completions", HOST + JSON + b"Content-Length: 99999999\r\n"))
    + (413, "request_too_large"),
    (
        "24",
        request(b"POST /v1/completions", HOST + CHUNKED)
        + (b"100000\r\n" + b" " * 2**20 + b"\r\n") * 5,
        413,
        "request_too_large",
    ),
    ("26", request(b"POST /v1/completions", HOST + JSON + b"Content-Encoding: gzip\r\n"))
    + (415, "unsupported_media_type"),
    ("27", request(b"POST /v1/completions", HOST + CHUNKED + b"Content-Length: 5\r\n"))
    + (400, "invalid_request"),
    ("27", request(b"POST /v1/completions", HOST + CHUNKED) + b"ZZ\r\n", 400, "invalid_request"),
    ("27", request(b"GET /health", HOST + b"X: a\r\n b\r\n"), 400, "invalid_request"),
    ("28", request(b"GET /health?" + b"x" * 10_000), 414, "url_too_long"),
    ("28", request(b"GET /health?" + b"x" * 70_000), 414, "url_too_long"),
    ("28", request(b"GET /health", HOST + b"X: " + b"y" * 65_536 + b"\r\n"))
    + (431, "headers_too_large"),
    ("28", request(b"GET /health", HOST + b"X-Y: z\r\n" * 10_000), 431, "headers_too_large"),
    (
        "34",
        request(
            b"POST /v1/completions",
            HOST + JSON + b"Content-Length: 99999999\r\nExpect: 100-continue\r\n",
        ),
        413,
        "request_too_large",
    ),
    ("36", request(b"GET /health", HOST + b"X-Request-Id: a b\r\n"), 400, "invalid_request"),
    ("36", request(b"GET /health", HOST + b"X-Request-Id: \r\n"), 400, "invalid_request"),
    ("36", request(b"GET /health", HOST + b"X-Request-Id: \xff\r\n"), 400, "invalid_request"),
    ("36", request(b"GET /health", HOST + b"X-Request-Id: " + b"x" * 2**20 + b"\r\n"))
    + (431, "headers_too_large"),
    (
        "37",
        request(
            b"GET /v1/completions",
            HOST + b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n",
        ),
        400,
        "invalid_request",
    ),
    ("38", request(b"GET /-/routes"), 404, "unknown_url"),
    ("38", request(b"GET /docs"), 404, "unknown_url"),
]


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [case[1:] for case in ODD],
    ids=[f"{row}-{number}" for number, (row, *_) in enumerate(ODD)],
)
def test_odd_requests_are_answered_by_us(app: Any, data: bytes, status: int, code: str) -> None:
    answered, headers, body = talk(app, data)
    assert answered == status, body
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert len(headers["x-request-id"]) == 1
    if status == 405:
        assert headers["allow"]


def test_one_id_for_each_answer(app: Any) -> None:
    _, given, _ = talk(app, request(b"GET /version", HOST + b"X-Request-Id: my-label\r\n"))
    assert given["x-request-id"] == ["my-label"]
    _, made, _ = talk(app, request(b"GET /version"))
    assert len(made["x-request-id"]) == 1 and made["x-request-id"] != ["my-label"]


def test_a_client_cannot_tell_serve_its_timeouts(app: Any) -> None:
    headers = HOST + b"X-Request-Timeout-Seconds: 0.000001\r\nX-Request-Disconnect-Disabled: ?1\r\n"
    assert talk(app, request(b"GET /version", headers))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_whose_time_is_over_ends(app: Any, stream: bool) -> None:
    body = {"prompt": "Hello", "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    with app.client() as http:
        answer = http.post("/v1/completions", json=body, headers={"X-Request-Timeout-Ms": "100"})
    assert answer.status_code == 408 or stream  # where a stream had begun, it is its last event
    last = answer.text.removesuffix("data: [DONE]\n\n").strip().split("\n\n")[-1]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "deadline_exceeded"
    app.idle()


def test_after_all_of_it_the_engine_is_idle(app: Any) -> None:
    app.idle()
