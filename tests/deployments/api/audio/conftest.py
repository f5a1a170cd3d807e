"""A model that hears behind the API, in this process; modules have a fixture ``tiny``."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from audio_models import AudioModel
from inline_client import InlineClient
from rayfin import LLM
from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.text.parsing.detect import detect
from rayfin.deployments.text.tokenizer import Tokenizer

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
    tokenizer = Tokenizer.load(tiny.folder)
    template = None if tokenizer.inner.chat_template else tiny.processor.chat_template
    engine: Any = InlineClient(llm._engine)
    service = OpenAIService(
        client=engine,
        tokenizer=tokenizer,
        model_names=["tiny"],
        max_model_len=llm._engine.info.max_model_len,
        chat_template=template,
        formats=detect(tokenizer, template),
        media=MediaReader(tiny.processor, LIMITS),
    )
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.engine = engine  # type: ignore[attr-defined]
        client.media = service.media  # type: ignore[attr-defined]
        client.tokenizer = tokenizer  # type: ignore[attr-defined]
        yield client
