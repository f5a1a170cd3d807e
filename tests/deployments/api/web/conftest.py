"""The fake engine of the OpenAI tests, what it shows of itself, and a browser."""

import importlib.util
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from rayfin.actors.metrics.snapshot import (
    FREE,
    KEPT,
    SHARED,
    EngineSnapshot,
    PagesView,
    RunningView,
    StepView,
    WaitingView,
)
from rayfin.deployments.api.app import build_api

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
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
REPLY = _OPENAI.REPLY


@pytest.fixture
def shown() -> EngineSnapshot:
    """Two requests that run and share a page, one that waits."""
    return EngineSnapshot(
        name="app/engine/one",
        epoch=0,
        steps=12,
        num_running=2,
        num_waiting=1,
        running=[
            RunningView(4, "decode", 20, 16, 3, 2),
            RunningView(5, "prefill", 40, 16, 0, 3),
        ],
        waiting=[WaitingView(6, 100, 0.75)],
        step=StepView(decode=1, prefill_rows=1, prefill_tokens=24, seconds=0.004),
        pages=PagesView(64, 16, [(SHARED, 1), (0, 1), (1, 2), (KEPT, 10), (FREE, 50)]),
        totals={
            "prompt_tokens": 60,
            "generation_tokens": 3,
            "preemptions": 0,
            "pages_read": 0,
            "moved": 0,
            "requeued": 0,
            "finished": {"stop": 4},
        },
    )


@pytest.fixture
def serving() -> Callable[..., AbstractContextManager[str]]:
    return _serving


@pytest.fixture
def url(service: Any) -> Iterator[str]:
    with _serving(service) as address:
        yield address


@contextmanager
def _serving(*services: Any) -> Iterator[str]:
    config = uvicorn.Config(build_api(*services), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/ui"
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def page() -> Iterator[Any]:
    """A browser's page; an error of a script or a refused file fails the test."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda reported: wrong.append(reported.text) if reported.type == "error" else None,
        )
        page.set_default_timeout(20_000)
        yield page
        browser.close()
        expected = ("status of 401", "status of 400")  # of the API, logged by the browser
        assert not [text for text in wrong if not any(own in text for own in expected)]
