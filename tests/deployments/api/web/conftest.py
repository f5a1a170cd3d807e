"""The fake engine of the OpenAI tests, and what it shows of itself."""

import importlib.util
from pathlib import Path

import pytest

from rayfin.actors.messages import (
    FREE,
    KEPT,
    SHARED,
    EngineSnapshot,
    PagesView,
    RunningView,
    StepView,
    WaitingView,
)

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
            "requeued": 0,
            "finished": {"stop": 4},
        },
    )
