"""A model that hears behind the API, in this process; modules have a fixture ``tiny``."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from audio_models import AudioModel
from inline_client import media_service
from rayfin import LLM
from rayfin.deployments.api.app import build_api
from rayfin.deployments.media.settings import MediaSettings

SETTINGS = {"device": "cpu", "threads": 1, "kv_cache_memory": 10**6, "max_decoding_batch": 4}
LIMITS = MediaSettings(
    urls=False, max_seconds=2.0, chunk_seconds=1.0, max_upload_seconds=12.0, max_upload_bytes=10**6
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm(tiny: AudioModel) -> Iterator[LLM]:
    with LLM(str(tiny.folder), **SETTINGS) as llm:
        yield llm


@pytest.fixture
async def client(tiny: AudioModel, llm: LLM) -> AsyncIterator[httpx.AsyncClient]:
    service = media_service(llm, tiny, LIMITS, tiny.processor.chat_template)
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.engine = service.client  # type: ignore[attr-defined]
        client.media = service.media  # type: ignore[attr-defined]
        client.tokenizer = service.tokenizer  # type: ignore[attr-defined]
        client.service = service  # type: ignore[attr-defined]
        yield client
