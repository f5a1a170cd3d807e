"""Several ingress replicas, one store: whichever is asked, the answer is the same."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from rayfin.actors.errors import EngineUnavailable, Overloaded
from rayfin.actors.timing import RESPONSE_OWNER_SECONDS
from rayfin.deployments.api.app import build_api
from rayfin.deployments.api.responses import store as store_module
from rayfin.deployments.api.responses.store import ResponseStore
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.generation.service import OpenAIService

pytestmark = pytest.mark.anyio
REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
ASK: dict[str, Any] = {"input": "hello"}
BACKGROUND = {**ASK, "background": True}


class Remote:
    """The store as if in another process: what crosses is pickled, and takes its time."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self.gone = False
        self.calls: list[str] = []

    async def __call__(self, method: str, *args: object) -> Any:
        self.calls.append(method)
        args = pickle.loads(pickle.dumps(args))
        await asyncio.sleep(0)
        if self.gone:
            raise EngineUnavailable("the store of responses does not answer")
        answer = await self.store.call(method, *args)
        answer = pickle.loads(pickle.dumps(answer))
        await asyncio.sleep(0)
        return answer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def until(condition: Callable[[], Any]) -> None:
    """Lets the others run until it holds; only a failure waits so long."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> ResponseStore:
    return ResponseStore(max_responses=20, clock=clock)


@pytest.fixture
def remote(store: ResponseStore) -> Remote:
    return Remote(store)


@pytest.fixture
async def shared(remote: Remote, anyio_backend: str) -> AsyncIterator[list[ResponseStoreClient]]:
    replicas = [ResponseStoreClient(name, remote) for name in ("a", "b")]
    yield replicas
    for one in replicas:
        one.close()


@pytest.fixture
async def replicas(
    service: OpenAIService, shared: list[ResponseStoreClient]
) -> AsyncIterator[list[httpx.AsyncClient]]:
    clients = []
    for responses in shared:
        app = build_api(service, responses=responses)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        clients.append(httpx.AsyncClient(transport=transport, base_url="http://rayfin"))
    yield clients
    for client in clients:
        await client.aclose()


async def create(http: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    reply = await http.post("/v1/responses", json=body)
    made: dict[str, Any] = reply.raise_for_status().json()
    return made


async def retrieve(http: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    reply = await http.get(f"/v1/responses/{response_id}")
    found: dict[str, Any] = reply.raise_for_status().json()
    return found


async def ended(http: httpx.AsyncClient, response_id: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while (found := await retrieve(http, response_id))["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0)
        return found


def text(response: dict[str, Any]) -> str:
    return "".join(item["content"][0]["text"] for item in response["output"])


async def test_one_that_has_ended(replicas: list[httpx.AsyncClient], engine: Any) -> None:
    """Read, read as events, listed, gone on from and deleted, where it was not made."""
    here, there = replicas
    streamed = await here.post("/v1/responses", json={**ASK, "stream": True})
    made = await create(here, {**ASK, "include": ["message.output_text.logprobs"]})
    assert await retrieve(there, made["id"]) == made == await retrieve(here, made["id"])
    path = f"/v1/responses/{made['id']}"
    events = (await there.get(path, params={"stream": "true"})).text
    assert events == (await here.get(path, params={"stream": "true"})).text
    assert events.count("event: ") > streamed.text.count("event: ")  # half characters have theirs
    items = (await there.get(f"{path}/input_items")).json()
    assert [item["content"][0]["text"] for item in items["data"]] == ["hello"]
    following = await create(there, {"input": "on", "previous_response_id": made["id"]})
    listed = await here.get(f"/v1/responses/{following['id']}/input_items", params={"order": "asc"})
    said = [item["content"][0]["text"] for item in listed.json()["data"]]
    assert said == ["hello", REPLY, "on"]
    assert (await there.delete(path)).json()["deleted"]
    for http in replicas:
        assert (await http.get(path)).status_code == 404


async def test_the_end_of_a_stream_is_known_everywhere(
    replicas: list[httpx.AsyncClient], store: ResponseStore, remote: Remote
) -> None:
    """Before the client hears of it: its next request may reach another replica."""
    here, there = replicas
    stream = await here.post("/v1/responses", json={**ASK, "stream": True})
    assert "response.completed" in stream.text
    (response_id,) = {line for line in stream.text.split('"') if line.startswith("resp_")}
    assert text(await retrieve(there, response_id)) == REPLY
    assert remote.calls.count("grow") == 1  # no client followed it on its way


async def test_one_in_the_background_is_followed(
    replicas: list[httpx.AsyncClient],
    remote: Remote,
    engine: Any,
    shared: list[ResponseStoreClient],
) -> None:
    here, there = replicas
    engine.pause_after = (6, asyncio.Event())
    made = await create(here, BACKGROUND)
    await until(lambda: engine.taken >= 6)
    async with asyncio.timeout(10):
        while len(text(found := await retrieve(there, made["id"]))) < 3:
            await asyncio.sleep(0)
    assert found["status"] == "in_progress" and REPLY.startswith(text(found))
    path = f"/v1/responses/{made['id']}"
    following = [
        asyncio.create_task(there.get(path, params={"stream": "true", "starting_after": after}))
        for after in (0, 7)
    ]
    await until(lambda: remote.calls.count("progress") == len(following))
    engine.pause_after[1].set()
    whole, rest = [(await stream).text for stream in following]
    assert whole.endswith(rest) and len(rest) < len(whole)
    assert whole.count("response.output_text.delta\n") > 3
    assert whole == (await here.get(path, params={"stream": "true", "starting_after": 0})).text
    assert await retrieve(there, made["id"]) == await retrieve(here, made["id"])
    assert not any(one._running or one._reports for one in shared)


@pytest.mark.parametrize("began", [False, True])
async def test_one_in_the_background_is_cancelled(
    replicas: list[httpx.AsyncClient], engine: Any, shared: list[ResponseStoreClient], began: bool
) -> None:
    here, there = replicas
    gate = asyncio.Event()
    if began:
        engine.pause_after = (4, gate)
    else:
        engine.gate = gate
    made = await create(here, BACKGROUND)
    await until(lambda: engine.open)
    path = f"/v1/responses/{made['id']}"
    for http in (there, there, here):
        reply = await http.post(f"{path}/cancel")
        assert (reply.status_code, reply.json()["status"]) == (200, "cancelled")
    assert len(engine.aborted) == 1 and not engine.open
    assert not shared[0]._running and not shared[0]._reports
    assert (await retrieve(there, made["id"]))["status"] == "cancelled"
    gate.set()
    foreground = await create(here, ASK)
    assert (await there.post(f"/v1/responses/{foreground['id']}/cancel")).status_code == 400


async def test_one_in_the_background_is_deleted(
    replicas: list[httpx.AsyncClient], remote: Remote, engine: Any, store: ResponseStore
) -> None:
    here, there = replicas
    engine.pause_after = (4, asyncio.Event())
    made = await create(here, BACKGROUND)
    await until(lambda: engine.taken >= 4)
    path = f"/v1/responses/{made['id']}"
    following = asyncio.create_task(there.get(path, params={"stream": "true"}))
    await until(lambda: "progress" in remote.calls)
    assert (await there.delete(path)).status_code == 200
    assert "response.failed" in (await following).text.splitlines()[-2]
    await until(lambda: engine.aborted)
    for http in replicas:
        assert (await http.get(path)).status_code == 404
    assert len(store) == 0 and not store._owner_of


async def test_what_fails_to_start_is_not_there(
    replicas: list[httpx.AsyncClient], engine: Any, store: ResponseStore
) -> None:
    engine.refusal = Overloaded("The queue is full.")
    for body in (ASK, {**ASK, "stream": True}):
        assert (await replicas[0].post("/v1/responses", json=body)).status_code == 429
    await until(lambda: len(store) == 0)
    made = await create(replicas[0], BACKGROUND)
    found = await ended(replicas[1], made["id"])
    assert found["status"] == "failed" and "full" in found["error"]["message"]


@pytest.mark.parametrize("moment", [0, 1, 2, 3, 5, 8])
async def test_a_client_that_leaves_at_any_moment(
    replicas: list[httpx.AsyncClient],
    engine: Any,
    store: ResponseStore,
    shared: list[ResponseStoreClient],
    moment: int,
) -> None:
    """Nothing of it stays in progress for ever."""
    engine.gate = asyncio.Event()
    asking = asyncio.create_task(replicas[0].post("/v1/responses", json=ASK))
    for _ in range(moment):
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await until(lambda: not (store._owner_of or shared[0]._running or engine.open))
    await until(lambda: len(store) == 0)


async def test_a_replica_that_ends_takes_its_responses_along(
    replicas: list[httpx.AsyncClient],
    engine: Any,
    clock: Clock,
    shared: list[ResponseStoreClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "RESPONSE_STORE_POLL_SECONDS", 0.01)
    here, there = replicas
    kept = await create(there, ASK)
    engine.pause_after = (4, asyncio.Event())
    lost = await create(here, BACKGROUND)
    following = asyncio.create_task(
        there.get(f"/v1/responses/{lost['id']}", params={"stream": "true"})
    )
    await until(lambda: engine.taken >= 4)
    shared[0].close()
    for _ in range(10):  # a call that was under way
        await asyncio.sleep(0)
    clock.now += RESPONSE_OWNER_SECONDS + 1
    assert "response.failed" in (await following).text.splitlines()[-2]
    found = await retrieve(there, lost["id"])
    assert found["status"] == "failed" and "ended" in found["error"]["message"]
    assert await retrieve(there, kept["id"]) == kept


async def test_without_the_store(
    replicas: list[httpx.AsyncClient], remote: Remote, engine: Any
) -> None:
    """What asks for it is refused for now; the rest goes on, a response on its way included."""
    here, there = replicas
    engine.pause_after = (4, asyncio.Event())
    made = await create(here, BACKGROUND)
    streaming = asyncio.create_task(here.post("/v1/responses", json={**ASK, "stream": True}))
    await until(lambda: engine.taken >= 8)
    remote.gone = True
    engine.pause_after[1].set()
    assert "response.completed" in (await streaming).text
    refused = await here.post("/v1/responses", json=ASK)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert (await there.get(f"/v1/responses/{made['id']}")).status_code == 503
    unstored = await create(here, {**ASK, "store": False})
    assert text(unstored) == REPLY
    remote.gone = False
    assert (await there.get("/v1/responses/resp_none")).status_code == 404


async def test_a_store_that_begins_anew_gets_what_still_runs(
    replicas: list[httpx.AsyncClient], remote: Remote, engine: Any
) -> None:
    """In the background or not; nothing of it is lost."""
    here, there = replicas
    engine.pause_after = (4, asyncio.Event())
    made = [await create(here, BACKGROUND) for _ in range(2)]
    streaming = asyncio.create_task(here.post("/v1/responses", json={**ASK, "stream": True}))
    await until(lambda: engine.taken >= 12)
    remote.store = ResponseStore()
    remote.store._since += 2
    engine.pause_after[1].set()
    stream = (await streaming).text
    (response_id,) = {line for line in stream.split('"') if line.startswith("resp_")}
    assert text(await retrieve(there, response_id)) == REPLY
    for one in made:
        assert text(await ended(there, one["id"])) == REPLY


async def test_the_store_is_bounded(replicas: list[httpx.AsyncClient]) -> None:
    made = [await create(replicas[i % 2], ASK) for i in range(25)]
    assert (await replicas[1].get(f"/v1/responses/{made[0]['id']}")).status_code == 404
    assert await retrieve(replicas[1], made[-1]["id"]) == made[-1]
