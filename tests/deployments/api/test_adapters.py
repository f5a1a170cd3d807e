"""LoRA adapters over HTTP: their names, loads and unloads, the bodies of vLLM's routes."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from rayfin.actors.adapters.files import read_folder
from rayfin.actors.adapters.part import AdapterRef, AdapterStats, short
from rayfin.actors.errors import EngineUnavailable, InvalidRequest
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.deployments.adapters.flags import folder_in, folders_in, read_modules
from rayfin.deployments.adapters.names import AdapterNames
from rayfin.deployments.adapters.registry import AdapterContents
from rayfin.deployments.api.app import build_api
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.http.keys import ApiKeys

pytestmark = pytest.mark.anyio
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
}


def write(folder: Path, seed: int = 0, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    ones = {"q.lora_A.weight": torch.ones(2, 4), "q.lora_B.weight": torch.full((6, 2), 1.0 + seed)}
    save_file(ones, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of --lora-dir, with an adapter beside it to which a link leads."""
    write(tmp_path / "dir" / "inside", seed=7)
    (tmp_path / "dir" / "link").symlink_to(write(tmp_path / "outside"))
    return tmp_path / "dir"


@pytest.fixture
async def http(
    service: Any, engine: Any, root: Path, anyio_backend: str
) -> AsyncIterator[httpx.AsyncClient]:
    contents = AdapterContents("store", root=str(root))
    service.adapters = AdapterNames(contents, engine.prepare, resolves=True)
    service.edge.client_adapters = True
    await service.adapters.start()
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as client:
        yield client
    service.adapters.close()


async def test_a_request_names_an_adapter(
    http: httpx.AsyncClient, engine: Any, tmp_path: Path
) -> None:
    folder = write(tmp_path / "sql")
    answer = await http.post(LOAD, json={"lora_name": "sql", "lora_path": str(folder)})
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    digest = read_folder(str(folder)).digest
    for path, body in BODIES.items():
        for name in ("sql", "tiny:sql"):
            answer = await http.post(path, json={"model": name, **body})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "sql"
            seen = engine.seen[-1]
            assert seen.part(AdapterRef).digest == digest and seen.part(AdapterRef).store == "store"
            assert f"adapter:{digest}" in seen.prefix_keys
        await http.post(path, json={"model": "tiny", **body})
        assert engine.seen[-1].part(AdapterRef) is None and engine.seen[-1].prefix_keys == ()
    cards = (await http.get("/v1/models")).json()["data"]
    shown = [(card["id"], card["root"], card["parent"]) for card in cards]
    assert shown[-2] == ("sql", str(folder), "org/tiny")
    assert (await http.get("/v1/models/sql")).json() == cards[-2]


async def test_load_unload_and_their_mistakes(
    http: httpx.AsyncClient, engine: Any, tmp_path: Path
) -> None:
    first, second = write(tmp_path / "v1"), write(tmp_path / "v2", seed=1)
    body = {"lora_name": "a", "lora_path": str(first)}
    assert (await http.post(LOAD, json=body)).status_code == 200
    again = await http.post(LOAD, json=body)
    assert (
        again.status_code == 400 and "has already been loaded" in again.json()["error"]["message"]
    )
    moved = body | {"lora_path": str(second), "load_inplace": True}
    assert (await http.post(LOAD, json=moved)).status_code == 200
    await http.post("/v1/completions", json={"model": "a", "prompt": "hi", "max_tokens": 1})
    assert engine.seen[-1].part(AdapterRef).digest == read_folder(str(second)).digest
    engine.bad_adapters = {"bad"}
    for change, status, param in (
        ({"lora_path": str(tmp_path / "none")}, 404, "lora_path"),
        ({"lora_path": str(tmp_path)}, 404, "lora_path"),
        ({"lora_path": str(write(tmp_path / "dora", use_dora=True))}, 400, "lora_path"),
        ({"lora_name": "tiny"}, 400, "lora_name"),
        ({"lora_name": ""}, 400, "lora_name"),
        ({"lora_name": "bad"}, 400, "lora_path"),
        ({"lora_name": 3}, 400, "lora_name"),
    ):
        answer = await http.post(LOAD, json={"lora_name": "b", "lora_path": str(first), **change})
        assert answer.status_code == status, (change, answer.text)
        assert answer.json()["error"]["param"] == param
    for name in ("b", "bad"):
        assert (await http.post(UNLOAD, json={"lora_name": name})).status_code == 404
    answer = await http.post(UNLOAD, json={"lora_name": "a"})
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'a' removed successfully.",
    )
    gone = await http.post("/v1/completions", json={"model": "a", "prompt": "hi"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_load_that_fails_changes_nothing(
    http: httpx.AsyncClient, engine: Any, tmp_path: Path, root: Path
) -> None:
    """A name keeps its content, and one of --lora-dir is not loaded."""
    first, second = write(tmp_path / "v1"), write(tmp_path / "v2", seed=1)
    body = {"lora_name": "a", "lora_path": str(first)}
    assert (await http.post(LOAD, json=body)).status_code == 200
    engine.bad_adapters = {"a", "inside"}
    moved = body | {"lora_path": str(second), "load_inplace": True}
    assert (await http.post(LOAD, json=moved)).status_code == 400
    ask = {"prompt": "hi", "max_tokens": 1}
    assert (await http.post("/v1/completions", json={"model": "a", **ask})).status_code == 200
    assert engine.seen[-1].part(AdapterRef).digest == read_folder(str(first)).digest
    assert (await http.post("/v1/completions", json={"model": "inside", **ask})).status_code == 404
    cards = (await http.get("/v1/models")).json()["data"]
    assert "inside" not in {card["id"] for card in cards}


async def test_an_engine_that_is_away_is_no_missing_adapter(
    http: httpx.AsyncClient, service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again with the next request, not in a minute."""
    body = {"model": "inside", "prompt": "hi", "max_tokens": 1}

    async def away(ref: Any) -> None:
        raise EngineUnavailable("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(service.adapters, "_check", away)
        assert (await http.post("/v1/completions", json=body)).status_code == 503
    assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_a_folder_of_adapters(http: httpx.AsyncClient, engine: Any, root: Path) -> None:
    body = {"prompt": "hi", "max_tokens": 1}
    assert (await http.post("/v1/completions", json={"model": "inside", **body})).status_code == 200
    assert engine.seen[-1].part(AdapterRef).path == str(root / "inside")
    for name in ("link", "../outside", "..", ".", "dir/inside", "inside/", "in\0side", "none"):
        answer = await http.post("/v1/completions", json={"model": name, **body})
        assert answer.status_code == 404, name
        assert folder_in(str(root), name) is None


async def test_the_folder_is_listed_in_rays_form_loaded_or_not(
    http: httpx.AsyncClient, service: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def listed() -> list[tuple[str, str, str | None]]:
        cards = (await http.get("/v1/models")).json()["data"]
        return [(card["id"], card["root"], card["parent"]) for card in cards]

    (root / "no adapter").mkdir()
    models, folder = await listed(), str(root / "inside")
    assert models[-1] == ("org/tiny:inside", folder, "org/tiny") and len(models) == 3
    body = {"model": "org/tiny:inside", "prompt": "hi", "max_tokens": 1}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    write(root / "new", seed=1)
    assert await listed() == models  # loaded now, and read a moment ago
    for name in ("inside", "org/tiny:inside"):
        card = (await http.get(f"/v1/models/{name}")).json()
        assert (card["id"], card["root"], card["parent"]) == (name, folder, "org/tiny")
    service.adapters._list_again = 0.0
    assert [own[0] for own in await listed()][-2:] == ["org/tiny:inside", "org/tiny:new"]

    async def away() -> dict[str, str]:
        raise EngineUnavailable("it is away")

    monkeypatch.setattr(service.adapters._registry, "folders", away)
    service.adapters._list_again = 0.0
    assert len(await listed()) == len(models) + 1
    assert folders_in(str(root / "none")) == {}


async def test_without_the_variable_operators_load(
    service: Any, engine: Any, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    service.edge.client_adapters = False
    service.edge.keys, service.edge.admin_keys = ApiKeys.load(["user"]), ApiKeys.load(["boss"])
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    body = {"lora_name": "a", "lora_path": str(write(tmp_path / "a"))}
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as client:
        for key, status in (("", 401), ("user", 403), ("boss", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post(LOAD, json=body, headers=headers)
            assert answer.status_code == status
        digest = short(read_folder(str(tmp_path / "a")).digest)
        stats = [
            EngineStats(adapters=AdapterStats(resident=frozenset({own})))
            for own in (digest, "other")
        ]
        engine.reports = [EngineReport.of(str(n), "name", own) for n, own in enumerate(stats)]
        listed = (await client.get("/admin/adapters", headers=headers)).json()["adapters"]
    assert [(own["model"], own["name"], own["path"], own["engines"]) for own in listed] == [
        ("org/tiny", "a", body["lora_path"], ["0"])
    ]


async def test_a_new_registry_learns_the_names_and_others_follow(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")

    async def fits(ref: Any) -> None:
        pass

    first = AdapterContents("store")
    names, other = AdapterNames(first, fits), AdapterNames(first, fits)
    await names.start()
    await other.start()
    await asyncio.sleep(0)
    ref = await names.load("a", str(folder))
    async with asyncio.timeout(30):
        while other.refs != {"a": ref}:
            await asyncio.sleep(0)
    assert names.refs == {"a": ref}
    second = AdapterContents("store")
    table = await second.changed("old", names._table, 0.0)
    assert table.refs == names.refs
    files = await second.fetch(ref.digest)
    assert files is not None and files.digest == ref.digest
    write(folder, seed=3)
    third = AdapterContents("store")
    await third.changed("old", names._table, 0.0)
    assert await third.fetch(ref.digest) is None, "another content of that path"
    assert await second.fetch(ref.digest) is files, "it is held"
    names.close()
    other.close()


async def test_a_new_registry_may_hear_of_a_load_first(tmp_path: Path) -> None:
    """It learns the names of the one before it from its first caller, once."""

    async def fits(ref: Any) -> None:
        pass

    first, second = AdapterContents("store"), AdapterContents("store")
    names = AdapterNames(first, fits)
    await names.start()
    a = await names.load("a", str(write(tmp_path / "a")))
    before = names._table
    names._registry = second
    b = await names.load("b", str(write(tmp_path / "b", seed=1)))
    assert names.refs == second.table.refs == {"a": a, "b": b}
    await second.unload("a")
    assert (await second.changed(before.version, before, 0.0)).refs == {"b": b}
    with pytest.raises(InvalidRequest, match="already been loaded"):
        await names.load("b", str(tmp_path / "a"))
    names.close()


def test_flags() -> None:
    read = read_modules(["a=/x=y", '{"name": "b", "path": "/z", "base_model_name": "m"}'])
    assert read == {"a": "/x=y", "b": "/z"}
    for wrong in (
        ["a"],
        ["=b"],
        ["{"],
        ['{"name": "a"}'],
        ['{"name": 1, "path": "b"}'],
        ["a=b"] * 2,
    ):
        with pytest.raises(Exception, match="lora_modules"):
            read_modules(wrong)


async def test_a_folder_is_read_once_for_many_requests(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while engines take long to check it; a caller that leaves stops nothing."""
    read: list[str] = []
    checked = asyncio.Event()

    async def slow(ref: Any) -> None:
        await checked.wait()

    contents = AdapterContents("store", root=str(root))
    real = contents._read
    monkeypatch.setattr(
        contents, "_read", lambda path, files: read.append(path) or real(path, files)
    )
    names = AdapterNames(contents, slow, resolves=True)
    await names.start()
    callers = [asyncio.create_task(names.find("inside")) for _ in range(20)]
    while not read:
        await asyncio.sleep(0.01)
    callers[0].cancel()
    late = asyncio.create_task(names.find("inside"))
    await asyncio.sleep(0)
    checked.set()
    found = await asyncio.gather(*callers[1:], late)
    assert len(set(found)) == 1 and found[0] is not None and len(read) == 1
    names.close()
