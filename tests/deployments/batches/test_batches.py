"""Files and batches with OpenAI's client, over the real HTTP layer; workers that die."""

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from described import Description
from rayfin.deployments.api.openapi import description
from rayfin.deployments.batches import line_run, worker
from rayfin.deployments.batches.folder import BatchFolder, FolderLimits
from rayfin.deployments.batches.objects import StoredBatch
from rayfin.deployments.batches.routes import FORM_BYTES, add_batch_routes
from rayfin.deployments.batches.worker import TENANT, BatchWorker
from rayfin.deployments.http.errors import add_error_handlers
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.layers import HttpSettings, arrange, settings_layers

MAX_FILE = 50_000
LIMITS = FolderLimits(max_file_bytes=MAX_FILE, max_lines=300, max_files=5, max_open=3)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BATCH_POLL_SECONDS", 0.01)
    monkeypatch.setattr(worker, "BATCH_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(line_run, "BATCH_RECORD_SECONDS", 0.02)
    monkeypatch.setattr(line_run, "RECORD_LINES", 8)


class Engine:
    """Answers prompts; "bad" is refused. ``gate`` holds all answers back while it is clear."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []  # tenant, prompt
        self.seeds: dict[str, set[int]] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        prompt = body["prompt"]
        self.seen.append((request.headers[TENANT], prompt))
        self.seeds.setdefault(prompt, set()).add(body["seed"])
        await asyncio.sleep(0.001)
        await self.gate.wait()
        if prompt == "bad":
            return httpx.Response(400, json={"error": {"message": "no"}})
        usage = {"prompt_tokens": 2, "completion_tokens": 3}
        return httpx.Response(200, json={"echo": prompt, "usage": usage})


class Site:
    """A folder, its HTTP routes, and workers over a fake engine."""

    def __init__(self, path: Path, limits: FolderLimits = LIMITS) -> None:
        self.path = path
        self.folder = BatchFolder(path, limits)
        self.engine = Engine()
        listed = path.parent / "keys"
        listed.write_text("a:key-a\nb:key-b\n")
        keys = ApiKeys.load((), str(listed))
        edge = HttpSettings(keys=keys, max_upload_bytes=MAX_FILE + FORM_BYTES)
        app = FastAPI(middleware=arrange("replica", settings_layers(edge)))
        add_error_handlers(app)
        add_batch_routes(app, self.folder)
        self._app = app

    def client(self, key: str = "key-a") -> openai.AsyncOpenAI:
        transport = httpx.ASGITransport(self._app)
        http = httpx.AsyncClient(transport=transport)
        return openai.AsyncOpenAI(
            api_key=key, base_url="http://x/v1", http_client=http, max_retries=0
        )

    def description(self) -> Description:
        return Description(description(self._app))

    def http(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self._app)
        key = {"Authorization": "Bearer key-a"}
        return httpx.AsyncClient(transport=transport, base_url="http://x", headers=key)

    @asynccontextmanager
    async def working(self, concurrency: int = 8) -> AsyncIterator[BatchWorker]:
        transport = httpx.MockTransport(self.engine)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            running = BatchWorker(BatchFolder(self.path, LIMITS), client, "m".__eq__, concurrency)
            task = asyncio.create_task(running.run())
            try:
                yield running
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _line(name: str, prompt: str | None = None, **changes: Any) -> str:
    value = {
        "custom_id": name,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": prompt or name},
    }
    return json.dumps({**value, **changes}) + "\n"


def _lines(count: int) -> bytes:
    return "".join(_line(f"r{i}") for i in range(count)).encode()


async def _submit(client: openai.AsyncOpenAI, data: bytes, **more: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        **{"completion_window": "24h", **more},  # type: ignore[arg-type]
    )


async def _until(client: openai.AsyncOpenAI, batch: Any, *statuses: str) -> Any:
    async with asyncio.timeout(20):
        while (batch := await client.batches.retrieve(batch.id)).status not in statuses:
            await asyncio.sleep(0.01)
    return batch


async def _read(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    content = await client.files.content(file_id)
    values = [json.loads(line) for line in content.text.splitlines()]
    assert max(Counter(own["custom_id"] for own in values).values()) == 1
    return {own["custom_id"]: own for own in values}


def _run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


def test_a_batch_from_upload_to_content(tmp_path: Path) -> None:
    async def run() -> None:
        site = Site(tmp_path)
        client = site.client()
        data = _lines(40) + _line("r40", "bad").encode()
        file = await client.files.create(file=("in.jsonl", data), purpose="batch")
        assert (file.bytes, file.filename, file.purpose) == (len(data), "in.jsonl", "batch")
        assert (await client.files.content(file.id)).content == data
        batch = await client.batches.create(
            *(),
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"name": "nightly"},
        )
        assert batch.status == "validating" and batch.metadata == {"name": "nightly"}
        assert batch.expires_at == batch.created_at + 24 * 3600
        await client.files.delete(file.id)  # the batch has the lines
        async with site.working():
            batch = await _until(client, batch, "completed")
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (41, 40, 1)
        assert batch.in_progress_at and batch.finalizing_at and batch.completed_at
        answers = await _read(client, batch.output_file_id)
        assert {name: own["response"]["body"]["echo"] for name, own in answers.items()} == {
            f"r{i}": f"r{i}" for i in range(40)
        }
        assert list(answers) == [f"r{i}" for i in range(40)]  # the order of the input
        errors = await _read(client, batch.error_file_id)
        assert errors["r40"]["response"]["status_code"] == 400
        assert {tenant for tenant, _ in site.engine.seen} == {"a"}
        for _ in range(2):  # the second is of records that are remembered
            assert [own.status for own in site.folder.batches("a")] == ["completed"]
            assert not site.folder.batches("b")
        listed = [own async for own in client.batches.list(limit=1)]
        assert [own.id for own in listed] == [batch.id]
        purposes = sorted([own.purpose async for own in client.files.list()])
        assert purposes == ["batch_output", "batch_output"]
        deleted = await client.files.delete(str(batch.output_file_id))
        assert deleted.deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(str(batch.output_file_id))

    _run(run)


def test_objects_are_as_the_api_describes_them(tmp_path: Path) -> None:
    async def run() -> None:
        site = Site(tmp_path)
        client, http, description = site.client(), site.http(), site.description()
        uploaded = await http.post(
            "/v1/files",
            files={"file": ("in.jsonl", _lines(3) + _line("r3", "bad").encode())},
            data={"purpose": "batch"},
        )
        description.check("/v1/files", uploaded)
        body = {"input_file_id": uploaded.json()["id"], "endpoint": "/v1/completions"}
        made = await http.post("/v1/batches", json=body)
        description.check("/v1/batches", made)
        bad = await _submit(client, b'{"custom_id": "a", "url": 3}\n')
        left = await http.post("/v1/batches", json=body)
        path = "/v1/batches/{batch_id}"
        description.check(
            f"{path}/cancel", await http.post(f"/v1/batches/{left.json()['id']}/cancel")
        )
        async with site.working():
            for name in (made.json()["id"], bad.id):
                await _until(client, await client.batches.retrieve(name), "completed", "failed")
        for name, status in ((made.json()["id"], "completed"), (bad.id, "failed")):
            response = await http.get(f"/v1/batches/{name}")
            assert response.json()["status"] == status
            description.check(path, response)
        description.check("/v1/batches", await http.get("/v1/batches", params={"limit": 2}))
        description.check("/v1/files", await http.get("/v1/files", params={"order": "asc"}))
        file = f"/v1/files/{made.json()['output_file_id'] or uploaded.json()['id']}"
        description.check("/v1/files/{file_id}", await http.get(file))
        description.check("/v1/files/{file_id}", await http.delete(file))
        description.check(path, await http.get("/v1/batches/none"))

    _run(run)


def test_lists_have_pages(tmp_path: Path) -> None:
    async def run() -> None:
        client = Site(tmp_path).client()
        ids = [(await _submit(client, _lines(1))).id for _ in range(3)]
        first = await client.batches.list(limit=2)
        assert first.has_more and len(first.data) == 2
        rest = await client.batches.list(limit=2, after=first.data[-1].id)
        assert {own.id for own in (*first.data, *rest.data)} == set(ids)
        with pytest.raises(openai.BadRequestError, match="no object with id"):
            await client.batches.list(after="batch_x")
        with pytest.raises(openai.BadRequestError, match="limit must be in"):
            await client.batches.list(limit=1000)

    _run(run)


def test_tenants_do_not_see_one_another(tmp_path: Path) -> None:
    async def run() -> None:
        site = Site(tmp_path)
        mine, other = site.client(), site.client("key-b")
        batch = await _submit(mine, _lines(2))
        calls = [
            lambda: other.files.retrieve(batch.input_file_id),
            lambda: other.files.content(batch.input_file_id),
            lambda: other.files.delete(batch.input_file_id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            ),
        ]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                await call()
        assert not (await other.files.list()).data and not (await other.batches.list()).data
        assert len((await mine.files.list()).data) == 1

    _run(run)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"nonsense\n" + _lines(1), [(1, "invalid_json_line")]),
        (_line("a").encode() + b"\n" + _line("a").encode(), [(3, "duplicate_custom_id")]),
        (_line("a", url="/v1/embeddings").encode(), [(1, "mismatched_url")]),
        (_line("a", body={"model": "other"}).encode(), [(1, "model_not_found")]),
        (_line("a", body={"stream": True}).encode(), [(1, "invalid_line")]),
        (b"\n\r\n  \n", [(None, "empty_file")]),
        (b"{}\n" * 200, [(number, "invalid_line") for number in range(1, 101)]),
        (b"[]\n" * 301, [(number, "invalid_json_line") for number in range(1, 101)]),
        (_lines(301), [(None, "too_many_lines")]),
        (b"\xff\xfe\0\0", [(1, "invalid_json_line")]),
    ],
)
def test_a_bad_file_fails_before_anything_runs(
    tmp_path: Path, data: bytes, found: list[tuple[int | None, str]]
) -> None:
    async def run() -> None:
        limits = FolderLimits(max_file_bytes=10**6, max_lines=300)
        site = Site(tmp_path, limits)
        client = site.client()
        stored = site.folder.add_file(
            *("a", _file(data)), filename="in.jsonl", purpose="batch", expires_after=None
        )
        batch = await client.batches.create(
            input_file_id=stored.id, endpoint="/v1/completions", completion_window="24h"
        )
        async with site.working():
            batch = await _until(client, batch, "failed")
        assert batch.errors is not None and batch.errors.data is not None
        assert [(own.line, own.code) for own in batch.errors.data] == found
        assert batch.failed_at and not site.engine.seen

    _run(run)


def _file(data: bytes) -> Any:
    import io

    return io.BytesIO(data)


@pytest.mark.parametrize(
    ("parts", "status", "param"),
    [
        ({"files": {"file": b"{}"}, "data": {"purpose": "fine-tune"}}, 400, "purpose"),
        ({"files": {"file": b"{}"}}, 400, "purpose"),
        ({"files": {"other": b"{}"}, "data": {"purpose": "batch"}}, 400, "other"),
        ({"files": {"file": b""}, "data": {"purpose": "batch"}}, 400, "file"),
        ({"files": {"file": b"x" * (MAX_FILE + 1)}, "data": {"purpose": "batch"}}, 413, None),
        ({"files": {"file": b"x" * 10**6}, "data": {"purpose": "batch"}}, 413, None),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "x": "y" * 5000}}, 400, None),
        ({"json": {"purpose": "batch"}}, 400, None),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, None),
        (
            {
                "files": {"file": b"{}"},
                "data": {"purpose": "batch", "expires_after[anchor]": "now"},
            },
            *(400, "expires_after.anchor"),
        ),
    ],
)
def test_bad_uploads_are_refused(
    tmp_path: Path, parts: dict[str, Any], status: int, param: str | None
) -> None:
    async def run() -> None:
        site = Site(tmp_path)
        http = site.client()._client
        headers = {"Authorization": "Bearer key-a", **parts.pop("headers", {})}
        answer = await http.post("http://x/v1/files", headers=headers, **parts)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"] == param
        assert not list((tmp_path / "files").iterdir())

    _run(run)


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"endpoint": "/v1/nothing"}, 400, "endpoint"),
        ({"completion_window": "24"}, 400, "completion_window"),
        ({"completion_window": "169h"}, 400, "completion_window"),
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"input_file_id": "../../x"}, 404, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"more": 1}, 400, "more"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 60}},
            *(400, "output_expires_after.seconds"),
        ),
        ({"output_expires_after": {"seconds": 3600}}, 400, "output_expires_after.anchor"),
        ({"endpoint": None}, 400, "endpoint"),
    ],
)
def test_bad_batches_are_refused(
    tmp_path: Path, changes: dict[str, Any], status: int, param: str
) -> None:
    async def run() -> None:
        site = Site(tmp_path)
        client = site.client()
        file = await client.files.create(file=("in.jsonl", _lines(1)), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": "/v1/completions", **changes}
        headers = {"Authorization": "Bearer key-a"}
        answer = await client._client.post("http://x/v1/batches", json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)

    _run(run)


def test_tenants_have_limits(tmp_path: Path) -> None:
    async def run() -> None:
        client = Site(tmp_path).client()
        for _ in range(3):
            await _submit(client, _lines(1))
        with pytest.raises(openai.RateLimitError, match="batches are open"):
            await _submit(client, _lines(1))
        await client.files.create(file=("in.jsonl", b"x"), purpose="batch")
        with pytest.raises(openai.RateLimitError, match="files already"):
            await client.files.create(file=("in.jsonl", b"x"), purpose="batch")

    _run(run)


def test_without_a_folder_batches_are_off() -> None:
    async def run() -> None:
        app = FastAPI()
        add_error_handlers(app)
        add_batch_routes(app, None)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://x"
        ) as client:
            for path in ("/v1/files", "/v1/batches"):
                answer = await client.get(path)
                assert answer.status_code == 404 and "--batch-dir" in answer.text

    _run(run)


def test_a_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    async def run() -> None:
        site = Site(tmp_path)
        client = site.client()
        batch = await _submit(client, _lines(100))
        async with site.working(4):
            while len(site.engine.seen) < 20:
                await asyncio.sleep(0.001)
            site.engine.gate.clear()  # some lines are in flight
            assert (await client.batches.cancel(batch.id)).status == "cancelling"
            batch = await _until(client, batch, "cancelled")
        answers = await _read(client, batch.output_file_id)
        assert 0 < len(answers) < 100
        assert batch.request_counts.completed == len(answers)
        assert batch.cancelling_at and batch.cancelled_at
        with pytest.raises(openai.BadRequestError, match="status 'cancelled'"):
            await client.batches.cancel(batch.id)

    _run(run)


class Times:
    """The time, which may leap."""

    leap = 0.0

    def time(self) -> float:
        return time.time() + self.leap

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def test_lines_that_miss_the_window_expire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = Times()
    monkeypatch.setattr(worker, "time", times)

    async def run() -> None:
        site = Site(tmp_path)
        client = site.client()
        batch = await _submit(client, _lines(60), completion_window="1h")
        async with site.working(4):
            while len(site.engine.seen) < 20:
                await asyncio.sleep(0.001)
            site.engine.gate.clear()
            times.leap = 3601.0
            batch = await _until(client, batch, "expired")
        answers = await _read(client, batch.output_file_id)
        errors = await _read(client, batch.error_file_id)
        assert answers.keys().isdisjoint(errors) and len(answers) + len(errors) == 60
        assert {own["error"]["code"] for own in errors.values()} == {"batch_expired"}

    _run(run)


def test_workers_that_die_answer_each_line_once(tmp_path: Path) -> None:
    """Each worker ends amid its lines, some with half a line written."""

    async def run() -> None:
        site = Site(tmp_path)
        client = site.client()
        batch = await _submit(client, _lines(200))
        folder = tmp_path / "batches" / batch.id
        for round in range(8):
            before = len(site.engine.seen)
            async with site.working(4):
                while len(site.engine.seen) < before + 15:
                    await asyncio.sleep(0.001)
            output = folder / "output.jsonl"
            if round % 2 and output.stat().st_size > 20:
                output.write_bytes(output.read_bytes()[: -1 - round])
        async with site.working():
            batch = await _until(client, batch, "completed")
        answers = await _read(client, batch.output_file_id)
        assert set(answers) == {f"r{i}" for i in range(200)}
        assert (batch.request_counts.total, batch.request_counts.completed) == (200, 200)
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (400, 600)
        assert all(len(seeds) == 1 for seeds in site.engine.seeds.values()), "another text"

    _run(run)


def test_two_workers_share_a_folder_and_no_batch(tmp_path: Path) -> None:
    async def run() -> None:
        site = Site(tmp_path)
        client = site.client()
        batches = [await _submit(client, _lines(50)) for _ in range(3)]
        async with site.working(4), site.working(4):
            for batch in batches:
                done = await _until(client, batch, "completed")
                assert len(await _read(client, done.output_file_id)) == 50
        assert len(site.engine.seen) == 150

    _run(run)


def test_a_worker_that_dies_while_it_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every save and publication: the next attempt ends the batch the same way."""
    from rayfin.deployments.batches.folder import BatchLease

    calls = Counter[str]()
    for name in ("save", "publish", "clean"):
        real = getattr(BatchLease, name)

        def flaky(lease: Any, name: str = name, real: Any = real) -> None:
            calls[name] += 1
            if calls[name] % 2:
                real(lease)
                raise OSError("the process dies here")
            real(lease)

        monkeypatch.setattr(BatchLease, name, flaky)

    async def run() -> None:
        site = Site(tmp_path)
        client = site.client()
        batch = await _submit(client, _lines(30) + _line("x", "bad").encode())
        async with site.working(4):
            batch = await _until(client, batch, "completed")
            await asyncio.sleep(0.1)
        assert len(await _read(client, batch.output_file_id)) == 30
        assert len(await _read(client, batch.error_file_id)) == 1
        assert (batch.request_counts.completed, batch.request_counts.failed) == (30, 1)

    _run(run)


def test_what_is_past_its_time_is_removed(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path, FolderLimits(retention=0.0))
    folder.add_file("a", _file(b"x"), filename="x", purpose="batch", expires_after=3600)
    gone = folder.add_file("a", _file(b"x"), filename="y", purpose="batch", expires_after=-1)
    (tmp_path / "files" / ".new-1").mkdir()
    folder.sweep()
    assert [own.filename for own in folder.files("a")] == ["x"]
    assert not (tmp_path / "files" / gone.id).exists()
    assert (tmp_path / "files" / ".new-1").exists()  # it may be an upload that runs


def test_answers_are_kept_for_as_long_as_asked(tmp_path: Path) -> None:
    async def run() -> None:
        site = Site(tmp_path)
        client = site.client()
        kept: Any = {"anchor": "created_at", "seconds": 7200}
        batch = await _submit(client, _lines(2), output_expires_after=kept)
        async with site.working():
            batch = await _until(client, batch, "completed")
        file = await client.files.retrieve(batch.output_file_id)
        assert file.expires_at == file.created_at + 7200

    _run(run)


def test_a_full_disk_is_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client = Site(tmp_path).client()

        def full(handle: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(openai.InternalServerError) as error:
            await client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        assert error.value.status_code == 507 and error.value.code == "storage_full"
        assert not list((tmp_path / "files").iterdir())

    _run(run)


def test_a_lease_is_one_process_s(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path)
    file = folder.add_file("a", _file(_lines(1)), filename="x", purpose="batch")
    batch: StoredBatch = folder.add_batch(
        *("a", file.id), endpoint="/v1/completions", window="24h", metadata=None
    )
    lease = folder.lease(batch.id)
    assert lease is not None and folder.lease(batch.id) is None
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(folder.lease(batch.id)))
    thread.start()
    thread.join()
    assert found == [None]
    lease.close()
    assert (again := folder.lease(batch.id)) is not None
    again.close()
