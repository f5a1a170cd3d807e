"""The fake engine of the OpenAI tests, as an operator sees it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.http.keys import ApiKeys

_PATH = Path(__file__).parents[1] / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("rayfin_tests_openai_conftest", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_OPENAI = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_OPENAI)

anyio_backend = _OPENAI.anyio_backend
tokenizer = _OPENAI.tokenizer
service = _OPENAI.service


@pytest.fixture
def engine(tokenizer: Any) -> Any:
    """Two engines, of which one drains."""
    fake = _OPENAI.FakeEngine(tokenizer)
    busy = EngineStats(
        steps=5, running=2, waiting=3, waiting_tokens=70, pages_held=4, pages_total=64,
        prompt_tokens=100, generation_tokens=40, prefix_queries=80, prefix_hits=20,
        finished={"stop": 6},
    )  # fmt: skip
    fake.reports = [
        EngineReport.of("0", "app/engine/0", busy),
        EngineReport.of("1", "app/engine/1", EngineStats(draining=True)),
    ]
    return fake


@pytest.fixture
def operated(service: Any) -> Any:
    """The service, with a key for clients and one for operators."""
    service.edge.keys = ApiKeys.load(["client-key"])
    service.edge.admin_keys = ApiKeys.load(["admin-key"])
    return service
