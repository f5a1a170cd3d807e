"""A model over a Ray Dataset: actors of its own, one of which is killed, and an application."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve

from rayfin import LLM, SamplingParams
from rayfin.actors.config import EngineArgs
from rayfin.data import RayfinConfig, build_processor
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs

ROWS = 96
NAME = f"rows-{os.getpid()}"
PARAMS = {"temperature": 0, "max_tokens": 24}


def _question(place: int) -> str:
    return f"What is {place} + {place * 7 % 50}?"


def _ask(row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": _question(row["id"])}]}


def _expected(solo: LLM) -> dict[int, str]:
    talks = [_ask({"id": place})["messages"] for place in range(ROWS)]
    outputs = solo.chat(talks, SamplingParams(**PARAMS), use_tqdm=False)
    return {place: own.outputs[0].text for place, own in enumerate(outputs)}


@pytest.fixture
def dataset(cluster: None) -> Any:
    data = pytest.importorskip("ray.data", reason="an extra")
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return data.range(ROWS, override_num_blocks=6)


def test_each_row_is_answered_once_though_an_actor_is_killed(
    dataset: Any, solo: LLM, settings: dict[str, Any]
) -> None:
    engine = {name: value for name, value in settings.items() if name not in ("model", "threads")}
    config = RayfinConfig(
        **{"model": settings["model"], "engine": engine, "sampling_params": PARAMS},
        **{"concurrency": 2, "batch_size": 4, "concurrent_batches": 2},
    )
    processor = build_processor(
        config,
        preprocess=_ask,
        postprocess=lambda row: {
            **{"id": row["id"], "text": row["generated_text"], "error": row["error"]},
            **{"pid": os.getpid(), "count": row["num_generated_tokens"]},
        },
    )
    rows: list[dict[str, Any]] = []
    killed = False
    for row in processor(dataset).iter_rows():
        rows.append(row)
        if not killed:
            os.kill(_actors()[0], signal.SIGKILL)
            killed = True
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    assert {row["id"]: row["text"] for row in rows} == _expected(solo)
    assert all(row["error"] is None and row["count"] > 0 for row in rows)


def _actors() -> list[int]:
    """The processes of the pool."""
    table = ray._private.state.actors(actor_state_name="ALIVE").values()
    found = [own["Pid"] for own in table if "RayfinRows" in own["ActorClassName"]]
    assert found, [own["ActorClassName"] for own in table]
    return found


@pytest.fixture
def application(
    deploy: Callable[..., Any], served: str, settings: dict[str, Any], tmp_path: Path
) -> Iterator[Any]:
    server = ServerArgs(batch_dir=str(tmp_path))
    yield deploy(bind_app(server, EngineArgs(**settings)), NAME, served, "/rows")
    serve.delete(NAME)


def test_rows_of_an_application_run_in_its_background(
    dataset: Any, solo: LLM, application: Any
) -> None:
    config = RayfinConfig(
        model=application.model, application=NAME, sampling_params=PARAMS, batch_size=32
    )
    rows = build_processor(config, preprocess=_ask)(dataset).take_all()
    assert {row["id"]: row["generated_text"] for row in rows} == _expected(solo)
    over_http = RayfinConfig(model=application.model, url=application.url, sampling_params=PARAMS)
    (row,) = build_processor(over_http, preprocess=_ask)(dataset.limit(1)).take_all()
    assert row["generated_text"] == _expected(solo)[row["id"]]
