"""The session of a request, by the names that clients give to it."""

from types import SimpleNamespace
from typing import Any

import pytest

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import SessionRef
from rayfin.deployments.http.caller import MAX_SESSION, session_of

CLAUDE = "x-claude-code-session-id"
OLD_USER = "user_9f_account__session_0c"


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, None),
        ({"x-session-id": "a"}, {}, SessionRef("a")),
        ({"x-session-id": "a", "x-parent-session-id": "b"}, {}, SessionRef("a", "b")),
        ({"x-session-id": "a", "x-parent-session-id": "a"}, {}, SessionRef("a")),
        ({"x-session-id": "a", CLAUDE: "b", "thread-id": "c"}, {}, SessionRef("a")),
        ({CLAUDE: "b"}, {"session_id": "c"}, SessionRef("b")),
        ({CLAUDE: "b", "x-claude-code-agent-id": "1"}, {}, SessionRef("b/1", "b")),
        (
            {
                CLAUDE: "b",
                "x-claude-code-agent-id": "2",
                "x-claude-code-parent-agent-id": "1",
            },
            {},
            SessionRef("b/2", "b/1"),
        ),
        ({"thread-id": "t", "x-codex-parent-thread-id": "p"}, {}, SessionRef("t", "p")),
        ({"session_id": "t"}, {}, SessionRef("t")),
        ({"x-dynamo-session-id": "d"}, {}, SessionRef("d")),
        ({"x-opencode-session": "o"}, {}, SessionRef("o")),
        ({}, {"prompt_cache_key": "k"}, SessionRef("k")),
        ({}, {"session_id": "s", "prompt_cache_key": "k"}, SessionRef("s")),
        ({}, {"conversation": {"id": "conv_1"}}, SessionRef("conv_1")),
        ({}, {"metadata": {"user_id": '{"session_id": "u"}'}}, SessionRef("u")),
        ({}, {"metadata": {"user_id": OLD_USER}}, SessionRef("0c")),
        ({}, {"metadata": {"user_id": "[]"}}, None),
        ({}, {"metadata": {"user_id": 7}, "session_id": ["x"]}, None),
        ({"thread-id": "x" * (MAX_SESSION + 1)}, {}, None),
        ({"thread-id": "a\tb"}, {"session_id": "\0"}, None),
        ({"x-session-id": "a", "x-session-final": "True"}, {}, SessionRef("a", final=True)),
        ({"x-session-id": "a", "x-session-final": "false"}, {}, SessionRef("a")),
        (
            {CLAUDE: "a", "x-claude-code-context-compacted": "1"},
            {},
            SessionRef("a", fresh=True),
        ),
        (
            {CLAUDE: "a", "x-claude-code-request-class": "auxiliary"},
            {},
            SessionRef("a", aside=True),
        ),
    ],
)
def test_the_first_name_counts(
    headers: dict[str, str], body: dict[str, Any], session: SessionRef | None
) -> None:
    assert session_of(headers, SimpleNamespace(**body)) == session
    assert session_of(headers, SimpleNamespace(model_extra=body)) == session


@pytest.mark.parametrize(
    "headers",
    [
        {"x-session-id": "x" * (MAX_SESSION + 1)},
        {"x-session-id": "a\tb"},
        {"x-session-id": "a", "x-session-final": "yes"},
        {"x-dynamo-session-final": ""},
    ],
)
def test_our_headers_are_checked(headers: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        session_of(headers)
    assert refusal.value.param in headers
