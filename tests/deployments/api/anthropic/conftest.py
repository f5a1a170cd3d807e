"""The fake engine of the OpenAI tests behind the same HTTP layer, and Anthropic's own client."""

import importlib.util
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from anthropic import AsyncAnthropic

_PATH = Path(__file__).parents[1] / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("rayfin_tests_openai_conftest", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_OPENAI = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_OPENAI)

anyio_backend = _OPENAI.anyio_backend
tokenizer = _OPENAI.tokenizer
engine = _OPENAI.engine
service = _OPENAI.service
http = _OPENAI.http


@pytest.fixture
def connect(service: Any) -> Callable[[], httpx2.AsyncClient]:
    """Makes HTTP clients of the service as it is then."""

    def client() -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(_OPENAI.build_api(service), raise_app_exceptions=False)
        return httpx2.AsyncClient(transport=transport, base_url="http://rayfin")

    return client


@pytest.fixture
async def anthropic(connect: Any, anyio_backend: str) -> AsyncIterator[AsyncAnthropic]:
    async with connect() as http:
        yield AsyncAnthropic(
            api_key="none", base_url="http://rayfin", http_client=http, max_retries=0
        )
