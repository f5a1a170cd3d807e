"""A model over a Ray Dataset by actors of its own, one of which is killed."""

import os
import signal
from typing import Any

import pytest
import ray

from rayfin import LLM, SamplingParams
from rayfin.data import RayfinConfig, build_processor

ROWS = 96
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
