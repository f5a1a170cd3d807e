"""Rows become lines and answers become columns, without an engine, Ray or its packages."""

import base64
import json
from typing import Any

import numpy as np
import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.batches.answers import LineAnswer
from rayfin.deployments.batches.lines import Line
from rayfin.deployments.rayllm.data_config import RayfinConfig, model_args
from rayfin.deployments.rayllm.rows import OUTPUTS, RowReader


def _reader(**settings: Any) -> RowReader:
    return RowReader(RayfinConfig(**settings))


def _line(reader: RowReader, row: dict[str, Any]) -> Line:
    (line,) = reader.lines([row])
    assert isinstance(line, Line), line
    return line


def test_each_task_has_its_route_and_body() -> None:
    talk = [{"role": "user", "content": "hello"}]
    line = _line(_reader(sampling_params={"max_tokens": 3, "top_p": 0.5}), {"messages": talk})
    assert line.url == "/v1/chat/completions"
    ids = {"return_token_ids": True}
    assert line.body == {"model": "demo", "max_tokens": 3, "top_p": 0.5, "messages": talk} | ids
    row = {"prompt_token_ids": np.array([5, 6]), "sampling_params": {"max_tokens": 4, "n": None}}
    line = _line(_reader(sampling_params={"max_tokens": 3}), row)
    assert (line.url, line.body["prompt"], line.body["max_tokens"]) == (
        "/v1/completions",
        [5, 6],
        4,
    )
    line = _line(_reader(task="embed"), {"prompt": "a", "lora": "own"})
    assert line.url == "/v1/embeddings"
    assert line.body == {"model": "own", "input": "a", "encoding_format": "base64"}
    assert _line(_reader(task="classify"), {"prompt": "a"}).body == {"model": "demo", "input": "a"}
    line = _line(_reader(task="score"), {"text_1": "a", "text_2": "b"})
    assert line.body == {"model": "demo", "text_1": "a", "text_2": "b"}


def test_what_a_table_adds_to_a_row_is_no_part_of_it() -> None:
    """Arrow gives all structs the same members; a seed is the same with and without them."""
    part = {"type": "text", "text": "hello"}
    plain = {"messages": [{"role": "user", "content": [part]}]}
    filled = {
        "messages": [{"role": "user", "content": [{**part, "image_url": None}], "name": None}],
        "prompt": None,
    }
    assert _line(_reader(), plain) == _line(_reader(), filled)


def test_seeds_are_of_the_content_the_order_and_the_column_that_is_named() -> None:
    def seeds(rows: list[dict[str, Any]], **settings: Any) -> list[int]:
        lines = _reader(**settings).lines(rows)
        return [own.prepared("0")["seed"] for own in lines if isinstance(own, Line)]

    rows = [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 2}, {"prompt": "a", "id": 1}]
    first = seeds(rows)
    assert first == seeds(rows) and len(set(first)) == 3
    assert seeds(rows[1:2])[0] == first[1]  # whatever is beside it
    other = [{**own, "id": 9} for own in rows]
    assert seeds(rows, row_id="id")[0] != seeds(other, row_id="id")[0]
    given = [{"prompt": "a", "sampling_params": {"seed": 7}}]
    assert seeds(given) == [7]


@pytest.mark.parametrize(
    ("row", "task", "message"),
    [
        ({}, "generate", "needs one of messages, prompt, prompt_token_ids"),
        ({"lora": "a"}, "classify", "needs one of prompt, prompt_token_ids"),
        ({"text_1": "a"}, "score", "no text_2"),
        ({"prompt": "a", "sampling_params": 3}, "generate", "must be an object"),
        ({"prompt": "a", "sampling_params": {"n": 2}}, "generate", "n must be 1"),
        ({"prompt": "a", "sampling_params": {"stream": True}}, "generate", "not have stream"),
    ],
)
def test_a_bad_row_has_an_error(row: dict[str, Any], task: Any, message: str) -> None:
    reader = _reader(task=task)
    (answer,) = reader.lines([row])
    assert isinstance(answer, LineAnswer)
    (output,) = reader.outputs([answer])
    assert message in output.pop("error") and not any(output.values())


def test_answers_become_columns() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 2}
    choice = {
        "message": {"content": None, "tool_calls": [{"id": "x"}], "reasoning": "so"},
        **{"finish_reason": "tool_calls", "token_ids": [1, 2]},
    }
    body = {"choices": [choice], "usage": usage}
    (row,) = _reader().outputs([LineAnswer("a", 1, 200, "", body)])
    assert tuple(row) == OUTPUTS["generate"]
    assert json.loads(row.pop("tool_calls")) == [{"id": "x"}]
    assert row == {
        **{"generated_text": "", "token_ids": [1, 2], "finish_reason": "tool_calls"},
        **{"reasoning": "so", "num_input_tokens": 4, "num_generated_tokens": 2, "error": None},
    }
    vector = np.array([0.5, -1.0], "<f4")
    body = {"data": [{"embedding": base64.b64encode(vector.tobytes()).decode()}], "usage": usage}
    (row,) = _reader(task="embed").outputs([LineAnswer("a", 1, 200, "", body)])
    assert np.array_equal(row["embedding"], vector) and row["num_input_tokens"] == 4
    body = {"data": [{"label": "no", "probs": [0.7, 0.3], "index": 0}], "usage": usage}
    (row,) = _reader(task="classify").outputs([LineAnswer("a", 1, 200, "", body)])
    assert (row["label"], row["probs"], row["error"]) == ("no", [0.7, 0.3], None)
    refused = {"error": {"message": "max_tokens must be at least 1"}}
    (row,) = _reader().outputs([LineAnswer("a", 1, 400, "", refused)])
    assert row["error"] == "max_tokens must be at least 1" and row["generated_text"] is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "draw"}, "task must be one of"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"concurrency": (3, 2)}, "concurrency must be"),
        ({"engine": {"max_model_length": 3}}, "max_model_length"),
        ({"engine": {"dtype": "float32"}, "url": "http://a"}, "engine has no meaning"),
        ({"url": "http://a", "application": "b"}, "exclude each other"),
    ],
)
def test_bad_settings_are_refused_before_anything_runs(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        RayfinConfig(**settings)


def test_an_engine_on_a_cpu_has_the_threads_that_ray_gives_it() -> None:
    assert model_args(RayfinConfig()).engine.threads == 1
    assert model_args(RayfinConfig(num_cpus=4)).engine.threads == 4
    assert model_args(RayfinConfig(num_cpus=4, engine={"threads": 2})).engine.threads == 2
    assert model_args(RayfinConfig(num_gpus=1)).engine.threads is None
