"""From a file to a file through a fake endpoint, interrupted and run again."""

import asyncio
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from rayfin.actors.errors import InvalidConfig, ServerError
from rayfin.deployments.batches import line_run, sender
from rayfin.deployments.batches.file_job import FileJob
from rayfin.deployments.batches.line_run import LineRun
from rayfin.deployments.batches.sender import LineSender


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "BATCH_PAUSE_SECONDS", (0.001, 0.002))
    monkeypatch.setattr(sender, "BATCH_SILENCE_SECONDS", 0.02)
    monkeypatch.setattr(line_run, "RECORD_LINES", 4)


class Endpoint:
    """Echoes a line's prompt; ``plan`` has statuses to answer first, by prompt."""

    def __init__(self, **plan: list[int]) -> None:
        self.plan = plan
        self.seen: list[str] = []
        self.in_flight = self.most = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["prompt"]
        self.seen.append(prompt)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        if statuses := self.plan.get(prompt):
            return httpx.Response(statuses.pop(0), json={"error": {"message": "later"}})
        return httpx.Response(200, json={"echo": prompt, "usage": {"completion_tokens": 2}})


def _lines(count: int) -> str:
    return "".join(_line(f"r{i}") for i in range(count))


def _line(name: str) -> str:
    line = {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": name},
    }
    return json.dumps(line) + "\n"


def _run(job: FileJob, endpoint: Any, concurrency: int = 8, stop_after: int | None = None) -> bool:
    async def run() -> bool:
        transport = httpx.MockTransport(endpoint)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            sending = LineSender(client, patience=0.05)
            lines = LineRun(job.lines(), sending.send, job.record, concurrency)

            async def send(line: Any) -> Any:
                if stop_after is not None and len(endpoint.seen) >= stop_after:
                    lines.stop()
                return await sending.send(line)

            lines._send = send
            await lines.run()
            return not lines.stopped

    try:
        whole = asyncio.run(run())
        if whole:
            job.finish()
        return whole
    finally:
        job.close()


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _job(folder: Path, stdin: bytes = b"", source: str | None = None) -> FileJob:
    return FileJob(source or str(folder / "in"), str(folder / "out"), io.BytesIO(stdin))


def test_every_line_is_answered_and_the_output_appears_whole(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(_lines(50))
    job, endpoint = _job(tmp_path), Endpoint()
    assert job.counts.total == 50
    assert not (tmp_path / "out").exists()
    assert _run(job, endpoint)
    answers = _read(tmp_path / "out")
    assert sorted(own["custom_id"] for own in answers) == sorted(f"r{i}" for i in range(50))
    assert all(own["response"]["body"]["echo"] == own["custom_id"] for own in answers)
    assert (job.counts.ok, job.counts.failed, job.counts.tokens) == (50, 0, 100)
    assert 1 < endpoint.most <= 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_bad_and_repeated_lines_get_an_error_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("nonsense\n" + _line("a") + "\n" + _line("a") + _line("b"))
    job = _job(tmp_path)
    assert job.counts.total == 4
    assert _run(job, Endpoint())
    answers = _read(tmp_path / "out")
    errors = {own["error"]["line"]: own["error"]["code"] for own in answers if own["error"]}
    assert errors == {1: "invalid_json_line", 4: "duplicate_custom_id"}
    ids = Counter(own["custom_id"] for own in answers)
    assert ids == {"a": 1, "b": 1, None: 2}
    assert (job.counts.ok, job.counts.failed) == (2, 2)


def test_a_bad_line_keeps_its_custom_id(tmp_path: Path) -> None:
    """Where it is the line's alone; and another run does not answer it again."""
    good = json.loads(_line("good"))
    wrong: list[dict[str, Any]] = [
        *({"url": "/v1/nothing"}, {"method": "GET"}, {"body": None}, {"url": None}),
        *({"body": {"prompt": "x", "stream": True}}, {"body": [1]}),
    ]
    lines = [{**good, "custom_id": f"bad{i}", **fields} for i, fields in enumerate(wrong)]
    lines += [{**good, "custom_id": "bad0"}, good, {**good, "method": "PUT"}]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert _run(_job(tmp_path), Endpoint())
    answers = _read(tmp_path / "out")
    expected = [*(f"bad{i}" for i in range(len(wrong))), None, "good", None]
    assert [own["custom_id"] for own in answers] == expected
    codes = [own["error"] and own["error"]["code"] for own in answers]
    assert codes == ["invalid_line"] * 6 + ["duplicate_custom_id", None, "invalid_line"]
    again = _job(tmp_path)
    assert again.counts.earlier == len(lines) and not [*again.lines()]
    again.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_the_output_has_the_order_of_the_input(tmp_path: Path, ordered: bool) -> None:
    """Also of several runs, and of lines that are no requests."""
    text = _line("slow") + "nonsense\n" + _lines(30) + "{}\n"
    (tmp_path / "in").write_text(text)
    endpoint = Endpoint(slow=[500, 500])
    stops = 15
    while True:
        source, output = str(tmp_path / "in"), str(tmp_path / "out")
        job = FileJob(source, output, io.BytesIO(), ordered=ordered)
        if _run(job, endpoint, 4, stop_after=stops):
            break
        stops += 15
    ids = [own["custom_id"] for own in _read(tmp_path / "out")]
    wanted = ["slow", None, *(f"r{i}" for i in range(30)), None]
    assert sorted(map(str, ids)) == sorted(map(str, wanted)) and (ids == wanted) == ordered
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_an_interrupted_run_goes_on_without_computing_anything_twice(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("nonsense\n" + _lines(60))
    endpoint = Endpoint()
    rounds = 0
    while not _run(_job(tmp_path), endpoint, 4, stop_after=len(endpoint.seen) + 10):
        rounds += 1
        assert not (tmp_path / "out").exists()
    assert rounds >= 3
    assert Counter(endpoint.seen) == {f"r{i}": 1 for i in range(60)}
    assert len(_read(tmp_path / "out")) == 61


def test_a_torn_answer_is_computed_again(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(_lines(10))
    _run(_job(tmp_path), Endpoint(), 2, stop_after=6)
    partial = tmp_path / "out.partial"
    partial.write_bytes(partial.read_bytes()[:-5])
    assert _run(_job(tmp_path), Endpoint())
    ids = Counter(own["custom_id"] for own in _read(tmp_path / "out"))
    assert ids == {f"r{i}": 1 for i in range(10)}


def test_a_longer_input_adds_to_a_whole_output(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(_lines(10))
    assert _run(_job(tmp_path), Endpoint())
    (tmp_path / "in").write_text(_lines(15))
    endpoint = Endpoint()
    job = _job(tmp_path)
    assert job.counts.earlier == 10
    assert _run(job, endpoint)
    assert sorted(endpoint.seen) == [f"r{i}" for i in range(10, 15)]
    assert len(_read(tmp_path / "out")) == 15


def test_standard_input_is_read_once(tmp_path: Path) -> None:
    job = _job(tmp_path, _lines(5).encode(), "-")
    assert job.counts.total is None
    assert _run(job, Endpoint())
    assert len(_read(tmp_path / "out")) == 5


def test_busy_answers_are_tried_again_and_failures_three_times(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("".join(map(_line, ("busy", "broken", "shaky", "bad"))))
    plan = {"busy": [429, 503, 429, 503, 408], "broken": [500] * 9, "shaky": [500, 502]}
    endpoint = Endpoint(**plan, bad=[400])
    assert _run(_job(tmp_path), endpoint)
    status = {own["custom_id"]: own["response"]["status_code"] for own in _read(tmp_path / "out")}
    assert status == {"busy": 200, "broken": 500, "shaky": 200, "bad": 400}
    assert Counter(endpoint.seen) == {"busy": 6, "broken": 3, "shaky": 3, "bad": 1}


def test_a_server_that_is_gone_ends_the_run_and_keeps_the_answers(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(_lines(8))
    endpoint = Endpoint(**{f"r{i}": [503] * 10**4 for i in range(4, 8)})
    with pytest.raises(ServerError, match="taken no request"):
        _run(_job(tmp_path), endpoint, 8)
    assert len(_read(tmp_path / "out.partial")) == 4


def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_text(_lines(40))
    job = _job(tmp_path)

    def full(answers: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(job, "record", full)
    with pytest.raises(OSError, match="No space"):
        _run(job, Endpoint())


@pytest.mark.parametrize(
    ("source", "output", "message"),
    [
        ("none", "out", "there is no file"),
        ("in", "in", "output_file must not be input_file"),
        ("http://x/in", "out", "must be a local file"),
        ("in", "http://x/out", "must be a local file"),
        ("in", "folder", "cannot be a file"),
        ("in", "none/out", "cannot be a file"),
        ("in", "other", "is no answer of a batch"),
    ],
)
def test_bad_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(_lines(1))
    Path("folder").mkdir()
    Path("other").write_text("no answers\n")
    with pytest.raises(InvalidConfig, match=message):
        FileJob(source, output, io.BytesIO())
    assert Path("other").read_text() == "no answers\n"


def test_one_process_at_a_time_writes_an_output(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(_lines(1))
    job = _job(tmp_path)
    with pytest.raises(InvalidConfig, match="another run-batch"):
        _job(tmp_path)
    job.close()
    _job(tmp_path).close()


def test_a_run_that_is_stopped_does_not_wait_for_a_server_that_is_away(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(_lines(4))
    job, said = _job(tmp_path), list[str]()

    async def run() -> None:
        transport = httpx.MockTransport(Endpoint(**{f"r{i}": [503] * 10**4 for i in range(4)}))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            sending = LineSender(client, patience=1000.0, say=said.append)
            lines = LineRun(job.lines(), sending.send, job.record, 4)
            task = asyncio.create_task(lines.run())
            while not said:
                await asyncio.sleep(0.001)
            lines.stop()
            sending.stop()
            await asyncio.wait_for(task, 30)

    asyncio.run(run())
    job.close()
    assert len(said) == 1 and "later" in said[0], "why, once"
    assert _read(tmp_path / "out.partial") == []
