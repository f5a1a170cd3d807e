"""Hostile files and bodies: each gets an error that names the field; nothing changes or runs."""

import asyncio
import json
import os
import pickle
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from demo_model.evaluate import MODEL_DIR
from rayfin import AsyncEngineArgs, AsyncLLM
from rayfin.deployments.api.app import build_api
from rayfin.deployments.http.keys import ApiKeys

ADMIN = {"authorization": "Bearer operator"}
CLIENT = {"authorization": "Bearer client"}
NAME = "model.layers.0.mlp.up_proj.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Tensors = dict[str, torch.Tensor]
HOSTILE: dict[str, Callable[[Path, Tensors], object]] = {}


class Marker:
    """An object whose pickle makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def hostile(make: Callable[[Path, Tensors], object]) -> Callable[[Path, Tensors], object]:
    """Adds a folder that a trainer may name."""
    HOSTILE[make.__name__] = make
    return make


def with_header(folder: Path, header: bytes, body: bytes = b"", length: int | None = None) -> None:
    size = len(header) if length is None else length
    (folder / SINGLE).write_bytes(size.to_bytes(8, "little") + header + body)


def one(dtype: str, shape: list[int], first: int, last: int) -> bytes:
    return json.dumps(
        {"x": {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}}
    ).encode()


def saved(folder: Path, tensors: Tensors, name: str = SINGLE) -> None:
    save_file(tensors, folder / name, {"format": "pt"})


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    HOSTILE[name] = lambda folder, own: saved(folder, own | {NAME: change(own[NAME])})


def headed(name: str, header: bytes, body: bytes = b"", length: int | None = None) -> None:
    HOSTILE[name] = lambda folder, own: with_header(folder, header, body, length)


def at(tensor: torch.Tensor, value: float) -> torch.Tensor:
    own = tensor.clone()
    own.view(-1)[7] = value
    return own


changed("not a number", lambda own: at(own, float("nan")))
changed("infinite", lambda own: at(own, float("inf")))
changed("another shape", lambda own: own[:-1].contiguous())
changed("transposed", lambda own: own.T.contiguous())
changed("integers", lambda own: own.int())
changed("codes of 8 bits", lambda own: own.to(torch.float8_e4m3fn))
changed("64 bits", lambda own: own.double())
changed("one row more", lambda own: torch.cat([own, own[:1]]))
changed("another rank", lambda own: own.unsqueeze(0).contiguous())
headed("nothing in it", b"")
headed("no JSON", b"{'x': 1}")
headed("a list", b"[]")
headed("nested too deep", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
headed("a header longer than the file", b"{}", length=1 << 40)
headed("offsets behind the end", one("F32", [4], 0, 16), b"\0" * 8)
headed("negative offsets", one("F32", [4], -16, 0), b"\0" * 16)
headed("an unknown dtype", one("X32", [4], 0, 16), b"\0" * 16)
headed("a shape that the bytes are not", one("F32", [1 << 40], 0, 16), b"\0" * 16)
headed("no offsets", b'{"x":{"dtype":"F32","shape":[1]}}', b"\0" * 4)
headed("a name that is a path", one("F32", [1], 0, 4).replace(b"x", b"../../x"), b"\0" * 4)


@hostile
def an_empty_folder(folder: Path, own: Tensors) -> None: ...


@hostile
def an_empty_file(folder: Path, own: Tensors) -> None:
    (folder / SINGLE).touch()


@hostile
def a_torn_file(folder: Path, own: Tensors) -> None:
    saved(folder, own)
    os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size - 9)


@hostile
def one_tensor_less(folder: Path, own: Tensors) -> None:
    saved(folder, {name: tensor for name, tensor in own.items() if name != NAME})


@hostile
def one_tensor_more(folder: Path, own: Tensors) -> None:
    saved(folder, own | {"model.layers.99.mlp.up_proj.weight": own[NAME].clone()})


@hostile
def pickles(folder: Path, own: Tensors) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(folder.parent / "ran")))


@hostile
def a_pickle_by_another_name(folder: Path, own: Tensors) -> None:
    (folder / SINGLE).write_bytes(pickle.dumps(Marker(folder.parent / "ran")))


@hostile
def an_archive_of_torch(folder: Path, own: Tensors) -> None:
    with zipfile.ZipFile(folder / SINGLE, "w") as file:
        file.writestr("archive/data.pkl", pickle.dumps(Marker(folder.parent / "ran")))


@hostile
def a_link_out(folder: Path, own: Tensors) -> None:
    (folder / SINGLE).symlink_to(MODEL_DIR / SINGLE)


@hostile
def a_link_to_nothing(folder: Path, own: Tensors) -> None:
    (folder / SINGLE).symlink_to(folder / "nothing")


@hostile
def a_pipe(folder: Path, own: Tensors) -> None:
    os.mkfifo(folder / SINGLE)


@hostile
def a_folder_by_that_name(folder: Path, own: Tensors) -> None:
    (folder / SINGLE).mkdir()


@hostile
def an_index_that_is_no_json(folder: Path, own: Tensors) -> None:
    saved(folder, own, "a.safetensors")
    (folder / INDEX).write_text("{")


@hostile
def an_index_of_files_elsewhere(folder: Path, own: Tensors) -> None:
    saved(folder, own, "a.safetensors")
    there = str(MODEL_DIR / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(own, there)}))


@hostile
def an_index_without_its_files(folder: Path, own: Tensors) -> None:
    saved(folder, {NAME: own[NAME]}, "a.safetensors")
    shards = {name: "a.safetensors" if name == NAME else "b.safetensors" for name in own}
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))


LONG = "x" * 5000
BODIES: list[tuple[str, Any]] = [
    *(("/admin/weights", {"path": path}) for path in ("", LONG, "a\0b", "/dev/zero", "/etc", 7)),
    ("/admin/weights", {"path": "HERE", "mode": "later"}),
    ("/admin/weights", {"path": "HERE", "kv": "none"}),
    ("/admin/weights", {"path": "HERE", "new": "drop"}),
    ("/admin/weights", {"path": "HERE", "order": "random"}),
    ("/admin/weights", {"path": "HERE", "dtype": "int8"}),
    ("/admin/weights", {"path": "HERE", "partial": "yes"}),
    ("/admin/weights", {"path": "HERE", "target": "both"}),
    ("/admin/weights", {"path": "HERE", "target": "draft"}),
    ("/admin/weights", {"path": "HERE", "timeout": -1}),
    ("/admin/weights", {"path": "HERE", "version": LONG}),
    ("/admin/weights", {"path": "HERE", "code": "import os"}),
    ("/admin/weights", [1]),
    ("/collective_rpc", {"method": "exec", "args": ["raise SystemExit"]}),
    ("/collective_rpc", {"method": "__class__"}),
    ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": 1}}),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}),
    ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}),
    ("/init_weights_update_group", {"backend": "nccl", "master_address": "x", "master_port": 1}),
    ("/update_weights_from_distributed", {"names": [7], "dtypes": [], "shapes": []}),
    ("/update_weights", {"update_info": {"names": ["x"], "dtype_names": [], "shapes": [[-1]]}}),
    ("/get_weights_by_name", {"name": "model.nothing"}),
    ("/weight_checker", {"action": "reset_tensors"}),
    ("/update_weight_version", {"new_version": ""}),
    ("/release_memory_occupation", {"tags": ["everything"]}),
    ("/pause_generation", {"mode": "forever"}),
]


async def refuse_all(http: httpx.AsyncClient, tmp_path: Path) -> int:
    tensors = load_file(MODEL_DIR / SINGLE)
    bodies: list[tuple[str, Any]] = []
    for number, (name, make) in enumerate(HOSTILE.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        make(folder, tensors)
        bodies.append(("/admin/weights", {"path": str(folder), "version": name}))
    for path, body in [*bodies, *BODIES]:
        if isinstance(body, dict) and body.get("path") == "HERE":
            body = body | {"path": str(MODEL_DIR / SINGLE)}
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, (path, str(body)[:200], answer.text)
        assert answer.json()["error"]["message"]
    sent = (pickle.dumps(Marker(tmp_path / "ran")), b"", b"\xff" * 100)
    for content in sent:
        update = "/admin/weights/update?version=x"
        answer = await http.put(update, content=content)
        assert answer.status_code == 400, answer.text
    text = {"content-type": "application/json"}
    answer = await http.post("/admin/weights", content=b"{", headers=text)
    assert answer.status_code == 400
    return len(bodies) + len(BODIES) + len(sent) + 1


@asynccontextmanager
async def server() -> AsyncIterator[httpx.AsyncClient]:
    """An operator's client of the demo model's server in this process."""
    args = AsyncEngineArgs("demo", threads=1, kv_cache_memory=16 * 2**20, dtype="float32")
    async with AsyncLLM.from_engine_args(args, enable_log_requests=False) as llm:
        service = await llm._service()
        keys, clients = ApiKeys.load(["operator"]), ApiKeys.load(["client"])
        edge = replace(service.edge, admin_keys=keys, keys=clients)
        transport = httpx.ASGITransport(build_api(replace(service, edge=edge)))
        url = "http://here"
        async with httpx.AsyncClient(transport=transport, base_url=url, headers=ADMIN) as http:
            yield http


def test_hostile_files_and_bodies(tmp_path: Path) -> None:
    async def program() -> None:
        async with server() as http:
            before = (await http.get("/admin/weights")).json()
            assert await refuse_all(http, tmp_path) >= 60
            assert (await http.get("/admin/weights")).json() == before
            assert (await http.get("/admin/weights", headers=CLIENT)).status_code == 403
            body = {"model": "demo", "prompt": "What is 3 + 4?", "max_tokens": 2}
            answer = await http.post("/v1/completions", json=body, headers=CLIENT)
            assert answer.status_code == 200

    asyncio.run(program())
    assert not (tmp_path / "ran").exists()


def test_what_operators_read() -> None:
    """Numbers of a tensor, and the digest beside that of a snapshot; another name for both."""

    async def program() -> None:
        async with server() as http:

            async def post(path: str, body: Any = None) -> Any:
                answer = await http.post(path, json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            rows = load_file(MODEL_DIR / SINGLE)[NAME]
            asked = {"name": NAME, "truncate_size": 3}
            assert await post("/get_weights_by_name", asked) == rows[:3].float().tolist()
            early = await http.post("/weight_checker", json={"action": "compare"})
            assert early.status_code == 409
            await post("/weights_checker", {"action": "snapshot"})
            assert (await post("/weight_checker", {"action": "compare"}))["success"]
            named = await post("/update_weight_version", {"new_version": "step-9"})
            assert named["new_version"] == "step-9"
            shown = (await http.get("/get_weight_version")).json()
            assert shown == {"weight_version": "step-9"}

    asyncio.run(program())
