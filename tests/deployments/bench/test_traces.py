"""Traces: files are read line by line, errors name the line, equal blocks are equal tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.agents import ScriptTurn
from rayfin.deployments.bench.traces import (
    BurstFilter,
    Call,
    Trace,
    is_burst_file,
    is_mooncake_file,
    read_burst,
    read_mooncake,
    read_sessions,
)

LINE = {"timestamp": 500, "input_length": 1000, "output_length": 7, "hash_ids": [3, 4]}
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,Conversation log
50,ChatGPT,300,0,300,API log
61,ChatGPT,30,9,39,API log
"""


def written(folder: Path, *lines: object) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return file


def test_mooncakes_lines(tmp_path: Path) -> None:
    later = {**LINE, "timestamp": 2000, "hash_ids": [3, 9, 10]}
    file = written(tmp_path, later, "", LINE)
    assert is_mooncake_file(file) and not is_burst_file(file)
    trace = read_mooncake(file)
    assert trace.calls == [Call(0.0, 1000, 7, (3, 4)), Call(1.5, 1000, 7, (3, 9))]
    assert trace.hit_ratio == 512 / 2000
    assert read_mooncake(file, limit=1).calls == [Call(0.0, 1000, 7, (3, 9))]


def test_prompts_without_ids_share_nothing(tmp_path: Path) -> None:
    entry = {"timestamp": 0, "input_length": 40, "output_length": 1}
    jobs = read_mooncake(written(tmp_path, entry, entry)).jobs(vocabulary=1000)
    assert jobs[0].prompt[:8] != jobs[1].prompt[:8]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: a JSON object is expected"),
        ({**LINE, "input_length": 0}, "line 2: input_length must be an integer of at least 1"),
        ({**LINE, "input_length": 1.5}, "line 2: input_length"),
        ({**LINE, "input_length": "many"}, "line 2: input_length"),
        ({**LINE, "output_length": True}, "line 2: output_length"),
        ({**LINE, "timestamp": -1}, "line 2: timestamp"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 2: timestamp"),
        ({"timestamp": 0, "output_length": 1}, "line 2: input_length is missing"),
        ({**LINE, "hash_ids": 5}, "line 2: hash_ids"),
        ({**LINE, "hash_ids": [1, "2"]}, "line 2: hash_ids"),
        ({**LINE, "hash_ids": [1]}, "line 2: input_length 1000 needs 2 hash_ids of 512 tokens"),
    ],
)
def test_a_bad_line_is_named(line: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        read_mooncake(written(tmp_path, LINE, line))
    assert named in str(caught.value) and "trace.jsonl" in str(caught.value)


def test_files_without_calls(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no calls"):
        read_mooncake(written(tmp_path, ""))


def test_burstgpts_table(tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    file.write_text(BURST)
    assert is_burst_file(file) and not is_mooncake_file(file)
    # the call without an answer has failed in its service
    assert read_burst(file).calls == [Call(0, 472, 18), Call(40, 1087, 230), Call(56, 30, 9)]
    assert [call.prompt_tokens for call in read_burst(file, BurstFilter("GPT-4")).calls] == [1087]
    only = read_burst(file, BurstFilter("ChatGPT", "api"))
    assert only.calls == [Call(0.0, 30, 9)]


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    file.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type\n"
        "5,abc,1.5,ChatGPT,472,18,Conversation log\n"
    )
    assert read_burst(file).calls == [Call(0, 472, 18)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (BURST.replace("Log Type", "Kind"), "line 1: the column 'Log Type' is missing"),
        (BURST.replace("1087", "x"), "line 3: Request tokens must be an integer"),
        (BURST.replace("45,GPT-4", "late,GPT-4"), "line 3: Timestamp must be a number"),
        (BURST + "70,ChatGPT\n", "line 6: Request tokens is missing"),
        (BURST.splitlines()[0], "no calls"),
    ],
)
def test_a_bad_table_is_named(text: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    file.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        read_burst(file)
    assert named in str(caught.value)


CALLS = some.lists(
    some.builds(
        lambda tokens, answer, ids: Call(0.0, min(tokens, 8 * len(ids)), answer, tuple(ids)),
        some.integers(1, 80),
        some.integers(1, 30),
        some.lists(some.integers(0, 6), min_size=1, max_size=10, unique=True),
    ),
    min_size=1,
    max_size=8,
)


@given(CALLS)
def test_prompts_share_what_their_ids_share(calls: list[Call]) -> None:
    trace = Trace(calls, 8)
    jobs = trace.jobs(vocabulary=5000, seed=1)
    assert [len(job.prompt) for job in jobs] == [call.prompt_tokens for call in calls]
    for one, job in zip(calls, jobs, strict=True):
        for other, second in zip(calls, jobs, strict=True):
            same = 0
            while same < min(len(one.blocks), len(other.blocks)) and (
                one.blocks[same] == other.blocks[same]
            ):
                same += 1
            shared = min(8 * same, len(job.prompt), len(second.prompt))
            assert job.prompt[:shared] == second.prompt[:shared]
            # and no more: 8 tokens of 4990 are never drawn twice
            rest = slice(shared, shared + 8)
            if len(job.prompt[rest]) == len(second.prompt[rest]) == 8:
                assert job.prompt[rest] != second.prompt[rest]


@given(CALLS, some.integers(16, 200))
def test_a_fitted_trace_fits(calls: list[Call], limit: int) -> None:
    trace = Trace(calls, 8)
    try:
        fitted = trace.fitted(limit)
    except InvalidConfig as error:
        assert "max_model_len" in str(error)
        return
    assert all(call.prompt_tokens + call.output_tokens <= limit for call in fitted.calls)
    assert [call.blocks for call in fitted.calls] == [call.blocks for call in calls]
    for call in fitted.calls:
        assert 1 <= call.prompt_tokens <= len(call.blocks) * fitted.block_tokens
    if max(call.prompt_tokens + call.output_tokens for call in calls) <= limit:
        assert fitted is trace


def test_a_trace_too_long_to_fit() -> None:
    with pytest.raises(InvalidConfig, match="max_model_len 100 is too small"):
        Trace([Call(0, 100_000, 1, tuple(range(200)))]).fitted(100)


def test_tokens_are_of_the_vocabulary_and_of_the_seed() -> None:
    trace = Trace([Call(0, 600, 1, (1, 2)), Call(1, 30, 1)])
    jobs = trace.jobs(vocabulary=12)
    assert {token for job in jobs for token in job.prompt} == {10, 11}
    assert trace.jobs(vocabulary=50) == trace.jobs(vocabulary=50)
    assert trace.jobs(vocabulary=50) != trace.jobs(vocabulary=50, seed=1)


def test_sessions_of_coding_agents(tmp_path: Path) -> None:
    def request(t: float, prompt: int, output: int, **more: Any) -> dict[str, Any]:
        return {"t": t, "type": "n", "in": prompt, "out": output, "hash_ids": [1], **more}

    inner = {"t": 12.0, "type": "subagent", "requests": [request(12.0, 40, 4)]}
    requests = [
        request(5.0, 100, 10, api_time=2.0),
        request(9.0, 150, 5, api_time=1.0),
        inner,
        request(20.0, 155, 0, think_time=3.5),
        request(30.0, 60, 5),
    ]
    file = tmp_path / "sessions.jsonl"
    file.write_text(f"{json.dumps({'id': 'a', 'requests': requests})}\n\n")
    child = (ScriptTurn(0.0, 40, 4),)
    assert read_sessions(file) == (
        (
            ScriptTurn(0.0, 100, 10),
            ScriptTurn(2.0, 40, 5),
            ScriptTurn(3.5, 1, 1, False, (child,)),
            ScriptTurn(10.0, 60, 5, True),
        ),
    )


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"id": 1}', "requests must be a list"),
        ('{"requests": [{"t": 0, "in": 0, "out": 1}]}', "in must be an integer"),
        ('{"requests": [{"t": 0, "in": 5}]}', "out is missing"),
        ('{"requests": []}', "no session has a request"),
    ],
)
def test_wrong_sessions_are_named(tmp_path: Path, line: str, named: str) -> None:
    file = tmp_path / "sessions.jsonl"
    file.write_text(line)
    with pytest.raises(InvalidConfig, match=named):
        read_sessions(file)
