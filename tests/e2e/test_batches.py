"""A batch over HTTP whose worker, engine and ingress are killed while it runs."""

import json
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import ray

from rayfin import LLM, SamplingParams
from rayfin.data import RayfinConfig, build_processor

ROWS = 64


@pytest.fixture(scope="module")
def demo(site: Callable[[str], Any]) -> Any:
    return site("demo")


@pytest.fixture
def client(demo: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=8) as client:
        yield client


def _submit(client: openai.OpenAI, model: str, count: int, **body: Any) -> Any:
    lines = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": model, "max_tokens": 24, "messages": _messages(i), **body},
        }
        for i in range(count)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )


def _messages(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {i % 90} + {i % 70}?"}]


def _pids(demo: Any, deployment: str) -> list[int]:
    title = f"ray::ServeReplica:{demo.name}:{deployment}"
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(title.encode()):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _texts(client: openai.OpenAI, batch: Any) -> dict[str, str]:
    values = [
        json.loads(line)
        for line in client.files.content(batch.output_file_id).text.split("\n")
        if line
    ]
    assert max(Counter(own["custom_id"] for own in values).values()) == 1
    return {
        own["custom_id"]: own["response"]["body"]["choices"][0]["message"]["content"]
        for own in values
    }


@pytest.mark.parametrize(
    ("lines", "killed"),
    [
        (60, ["batches", "ingress"]),
        pytest.param(
            300,
            ["batches", "scheduler", "batches", "runner", "ingress", "batches"],
            marks=pytest.mark.thorough(reason="test_faults.py kills a scheduler and runners"),
        ),
    ],
)
def test_a_batch_survives_the_death_of_each_process(
    lines: int,
    killed: list[str],
    demo: Any,
    client: openai.OpenAI,
    solo: LLM,
    eventually: Callable[..., Any],
) -> None:
    batch = _submit(client, demo.model, lines, temperature=0)

    def seen() -> Any:
        """The batch; None while no ingress answers, as the only one has been killed."""
        try:
            return client.batches.retrieve(batch.id)
        except (openai.APIConnectionError, openai.InternalServerError):
            return None

    def done() -> int:
        counts = None if (found := seen()) is None else found.request_counts
        return 0 if counts is None else counts.completed

    draw = random.Random(1)
    victims: dict[str, Callable[[], list[int]]] = {
        "scheduler": lambda: [ray.get(demo.scheduler().process.remote()).pid],
        "runner": lambda: [own.pid for own in ray.get(demo.scheduler().runners.remote())],
        "batches": lambda: _pids(demo, "batches"),
        "ingress": lambda: _pids(demo, "ingress"),
    }
    for number, victim in enumerate(killed, 1):
        point = number * lines // (len(killed) + 2) + draw.randrange(10)
        eventually(lambda point=point: done() >= point, f"{point} lines are answered")
        for pid in eventually(victims[victim], f"there is something of {victim}"):
            os.kill(pid, signal.SIGKILL)

    def completed() -> Any:
        found = seen()
        assert found is None or found.status in ("in_progress", "finalizing", "completed"), found
        return found if found is not None and found.status == "completed" else None

    ended = eventually(completed, "the batch completes")
    assert (ended.request_counts.total, ended.request_counts.completed) == (lines, lines)
    quiet = solo.chat(
        [_messages(i) for i in range(lines)],
        SamplingParams(temperature=0, max_tokens=24),
        use_tqdm=False,
    )
    assert _texts(client, ended) == {f"r{i}": out.outputs[0].text for i, out in enumerate(quiet)}


def test_series_and_refusals_of_a_served_batch(
    demo: Any, client: openai.OpenAI, eventually: Callable[..., Any]
) -> None:
    good = _submit(client, demo.model, 2)
    eventually(lambda: client.batches.retrieve(good.id).status == "completed", "it completes")
    batch = _submit(client, "other", 3)
    failed = eventually(
        lambda: (own := client.batches.retrieve(batch.id)).status == "failed" and own,
        "it fails in validation",
    )
    assert [own.code for own in failed.errors.data] == ["model_not_found"] * 3
    with pytest.raises(openai.NotFoundError):
        client.files.content("file-none")
    eventually(lambda: _sample(demo, 'batch_lines_total{.*result="ok".*}') > 0, "it reports")
    assert _sample(demo, "ingress_replicas{.*}") == 1


def _sample(demo: Any, pattern: str) -> float:
    with demo.client() as http:
        text = http.get("/metrics").raise_for_status().text
    found = re.findall(rf"^rayfin_{pattern} (\S+)$", text, re.MULTILINE)  # of each model
    return max(map(float, found), default=-1.0)


def test_rows_of_a_dataset_are_answered_by_the_application(demo: Any, solo: LLM) -> None:
    """The actors hold no engine; a scheduler that is killed costs no row."""
    data = pytest.importorskip("ray.data", reason="an extra")
    context = data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    params = {"temperature": 0, "max_tokens": 24}
    config = RayfinConfig(
        **{"model": demo.model, "application": demo.name, "sampling_params": params},
        **{"batch_size": 8, "concurrent_batches": 2},
    )
    processor = build_processor(config, preprocess=lambda row: {"messages": _messages(row["id"])})
    engine = ray.get(demo.scheduler().process.remote())
    rows = []
    for row in processor(data.range(ROWS, override_num_blocks=4)).iter_rows():
        if not rows:
            os.kill(engine.pid, signal.SIGKILL)
        rows.append(row)
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    assert {row["error"] for row in rows} == {None}
    quiet = solo.chat([_messages(i) for i in range(ROWS)], SamplingParams(**params), use_tqdm=False)
    expected = {i: out.outputs[0] for i, out in enumerate(quiet)}
    assert {row["id"]: row["generated_text"] for row in rows} == {
        i: own.text for i, own in expected.items()
    }
    assert {row["id"]: row["token_ids"] for row in rows} == {
        i: list(own.token_ids) for i, own in expected.items()
    }
    assert ray.get(demo.scheduler().process.remote()) != engine


def test_a_row_that_the_application_refuses_has_an_error(demo: Any) -> None:
    data = pytest.importorskip("ray.data", reason="an extra")
    config = RayfinConfig(model="other", application=demo.name)
    (row,) = build_processor(config)(data.from_items([{"prompt": "x"}])).take_all()
    assert "other" in row["error"] and row["generated_text"] is None
