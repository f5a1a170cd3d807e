"""The description of the API, and whether it is true: schemathesis asks for anything."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from rayfin.deployments.api.app import build_api
from rayfin.deployments.api.openapi import BODIES, FAILURES, description
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.keys import ApiKeys

pytestmark = pytest.mark.slow(reason="fuzzes every route")

CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)
EXAMPLES = 12  # of each operation


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_the_api_is_as_described(
    service: OpenAIService, mode: GenerationMode, depth: Callable[[int], int]
) -> None:
    """Well-formed or not: no failure of the server's, and every answer of a described form."""
    schema = schemathesis.openapi.from_asgi("/openapi.json", build_api(service))
    asked = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        try:
            cases = operation.as_strategy(generation_mode=mode)
        except Unsatisfiable:  # an operation without parameters cannot be asked wrongly
            continue

        @given(cases)
        @settings(
            max_examples=depth(EXAMPLES),
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            case.validate_response(case.call(), checks=CHECKS)

        try:
            ask()
        except Unsatisfiable:
            continue
        asked += 1
    assert asked >= len(BODIES)


def test_every_operation_is_described(service: OpenAIService) -> None:
    document = description(build_api(service))
    failures = {str(status) for status in FAILURES}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            where = f"{method} {path}"
            assert failures < set(operation["responses"]), where
            assert "422" not in operation["responses"], where
            if method == "post" and path in BODIES:
                assert operation["requestBody"]["required"], where
    assert set(BODIES) <= set(document["paths"])


@pytest.mark.anyio
async def test_it_needs_a_key_where_there_are_keys(service: OpenAIService) -> None:
    service.edge.keys, service.edge.docs = ApiKeys.load(["secret"]), True
    transport = httpx.ASGITransport(build_api(service))
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as http:
        for path in ("/openapi.json", "/docs"):
            assert (await http.get(path)).status_code == 401
            assert (await http.get(path, headers=headers)).status_code == 200
