"""docs/api.md has a row for every field that the code knows, and for the routes that there are."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rayfin.deployments.api.anthropic import bodies as anthropic
from rayfin.deployments.api.app import build_api
from rayfin.deployments.api.openai import bodies as openai
from rayfin.deployments.api.openai import tokenize
from rayfin.deployments.api.responses import bodies as responses
from rayfin.deployments.generation.members import NOT_SERVED
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.layers import HttpSettings
from rayfin.deployments.http.paths import ADMIN_PATHS

PATH = Path(__file__).parents[2] / "docs" / "api.md"
WORD = re.compile(r"`([a-z_0-9]+)[`.]")  # a field, or the field before a dot


def section(title: str) -> str:
    """The text below a heading."""
    return PATH.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def fields(*kinds: type[BaseModel]) -> set[str]:
    return {name for kind in kinds for name in kind.model_fields}


@pytest.mark.parametrize(
    ("title", "known"),
    [
        (
            "/v1/completions and /v1/chat/completions",
            fields(openai.CompletionRequest, openai.ChatCompletionRequest),
        ),
        (
            "/tokenize and /detokenize",
            fields(tokenize.TokenizeRequest, tokenize.DetokenizeRequest),
        ),
        (
            "/v1/responses",
            fields(responses.ResponseRequest),
        ),
        ("/v1/messages", fields(anthropic.MessagesRequest)),
    ],
)
def test_every_field_has_a_row(title: str, known: set[str]) -> None:
    rows = [line for line in section(title).splitlines() if line.startswith("|")]
    named = {word for row in rows for word in WORD.findall(row)}
    assert known <= named, f"docs/api.md does not say: {sorted(known - named)}"


def written_table() -> str:
    """Returns the table of members, a row for each API."""
    rows = ["| Bodies of | Refused unless empty | Without effect |", "|---|---|---|"]
    for api, members in NOT_SERVED.items():
        refused = ", ".join(f"`{name}`" for name, member in members.items() if member.refused)
        ignored = ", ".join(f"`{name}`" for name, member in members.items() if not member.refused)
        rows.append(f"| {api} | {refused} | {ignored} |")
    return "\n".join(rows)


def test_members_that_are_not_served() -> None:
    assert written_table() in section("Members that are not served")


def test_every_route_of_operators_has_a_row() -> None:
    rows = section("Operators' routes").split("\n|---")[1]
    words = [word for row in rows.splitlines() for word in re.findall(r"`([^`]*)`", row[:80])]
    named = {path for word in words for path in re.findall(r"/[^ ,?]*", word)}
    assert named == ADMIN_PATHS


def test_every_route_has_a_row() -> None:
    edge = HttpSettings(tokenizer_info=True)
    service: Any = OpenAIService(None, None, ["tiny"], 128, edge=edge)  # type: ignore[arg-type]
    served = {getattr(route, "path", "") for route in build_api(service).routes}
    rows = section("Routes")
    words = re.findall(r"`([^`]*)`", rows)
    named = {path for word in words for path in re.findall(r"/[^ ,?]*", word)}
    plain = {re.sub(r"{response_id}", "{id}", path).replace(":path", "") for path in served}
    assert plain == named
