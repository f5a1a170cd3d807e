"""What rollout workers of RL frameworks ask of a vLLM engine, as programs of ours.

``Worker`` makes the calls that verl's rollout server makes of an AsyncLLM, ``Remote`` those that
SkyRL's client makes over HTTP.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from demo_model.evaluate import MODEL_DIR
from rayfin import AsyncEngineArgs, AsyncLLM, SamplingParams
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.app import build_api
from rayfin.deployments.http.keys import ApiKeys

SETTINGS: dict[str, Any] = {"threads": 1, "kv_cache_memory": 16 * 2**20, "dtype": "float32"}
PROMPT = list(range(20, 34))
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "logprobs": True}
KEY = {"authorization": "Bearer operator"}
UPDATE = "/admin/weights/update"
GROUP = {"master_address": "127.0.0.1", "master_port": 29500, "world_size": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a trainer."""
    path = tmp_path_factory.mktemp("step") / "model.safetensors"
    tensors = load_file(MODEL_DIR / "model.safetensors")
    save_file({name: own * 1.01 for name, own in tensors.items()}, path, {"format": "pt"})
    return path


@asynccontextmanager
async def engine() -> AsyncIterator[AsyncLLM]:
    args = AsyncEngineArgs("demo", max_num_seqs=8, **SETTINGS)
    async with AsyncLLM.from_engine_args(args, enable_log_requests=False) as llm:
        yield llm


class Worker:
    """A rollout server in the trainer's process."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm

    async def generate(self, ids: list[int], settings: dict[str, Any], request_id: str) -> Any:
        settings = dict(settings)
        settings["logprobs"] = 0 if settings.pop("logprobs", False) else None
        settings.setdefault("repetition_penalty", 1.0)
        params = SamplingParams(max_tokens=settings.pop("max_tokens"), **settings)
        prompt = {"prompt_token_ids": ids, "multi_modal_data": {}}
        last = None
        async for output in self.llm.generate(
            prompt=prompt,
            sampling_params=params,
            request_id=request_id,
            lora_request=None,
            priority=0,
        ):
            last = output
        assert last is not None
        choice = last.outputs[0]
        scored = zip(choice.token_ids, choice.logprobs or [], strict=True)
        logprobs = [entry[token].logprob for token, entry in scored]
        reason = "aborted" if choice.finish_reason == "abort" else "completed"
        return choice.token_ids, logprobs, reason, choice.weight_versions

    async def update(self, path: Path, version: str) -> None:
        """Ends what runs, as a trainer does that sends partial rollouts again."""
        await self.llm.pause_generation(wait_for_inflight_requests=False, clear_cache=True)
        await self.llm.update_weights(path, version)
        await self.llm.resume_generation()

    async def sleep(self) -> None:
        await self.llm.wait_for_requests_to_drain()
        await self.llm.reset_prefix_cache()
        await self.llm.sleep(level=1)

    async def wake_up(self) -> None:
        await self.llm.wake_up(tags=["kv_cache", "weights"])


def test_a_rollout_server_in_the_trainers_process(trained: Path) -> None:
    async def program() -> None:
        async with engine() as llm:
            worker = Worker(llm)
            await llm.check_health()
            assert await llm.list_loras() == set() and await llm.is_sleeping() is False
            running = asyncio.create_task(worker.generate(PROMPT, LONG, "r1"))
            while not (await (await llm._service()).client.engines())[0].stats.running:
                await asyncio.sleep(0.01)
            await worker.update(trained, "step-1")
            ids, logprobs, reason, versions = await running
            assert reason == "aborted" and len(ids) == len(logprobs) < LONG["max_tokens"]
            assert all(span["version"] == "default" for span in versions)
            rest = {**LONG, "max_tokens": 20}
            more, _, reason, versions = await worker.generate(PROMPT + ids, rest, "r1")
            assert reason == "completed" and len(more) == 20
            assert versions == [{"version": "step-1", "start": 0, "end": 20}]
            await worker.sleep()
            assert await llm.is_sleeping()
            await worker.wake_up()
            again = await worker.generate(PROMPT, {**LONG, "max_tokens": 2}, "r2")
            assert len(again[0]) == 2
            (report,) = await llm.collective_rpc("reload_weights", args=(str(trained),))
            assert [report["digest"]] == await llm.collective_rpc("checksum")
            for method in ("init_device", len):
                with pytest.raises(InvalidRequest, match="method must be"):
                    await llm.collective_rpc(method)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequest) as caught:
                await llm.update_weights(trained, mode="later")  # type: ignore[arg-type]
            assert caught.value.param == "mode"

    asyncio.run(program())


class Remote:
    """A client of a rollout server: token ids out and in, and calls of the trainer beside."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, path: str, body: Any = None, **params: Any) -> Any:
        answer = await self.http.post(path, json=body, params=params or None, headers=KEY)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def put(self, version: str, content: bytes) -> Any:
        params = {"version": version}
        answer = await self.http.put(UPDATE, params=params, content=content, headers=KEY)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def generate(self, ids: list[int], settings: dict[str, Any]) -> tuple[Any, list[float]]:
        body = {"sampling_params": settings, "model": "demo", "token_ids": ids}
        headers = {"X-Session-ID": "trajectory-7"}
        answer = await self.http.post("/inference/v1/generate", json=body, headers=headers)
        (choice,) = answer.json()["choices"]
        return choice, [own["logprob"] for own in choice["logprobs"]["content"]]


def test_a_rollout_server_over_http(trained: Path) -> None:
    async def program() -> None:
        async with engine() as llm:
            service = await llm._service()
            keys = ApiKeys.load(["operator"])
            app = build_api(replace(service, edge=replace(service.edge, admin_keys=keys)))
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://rollouts") as http:
                await converse(Remote(http), trained)

    asyncio.run(program())


async def converse(remote: Remote, trained: Path) -> None:
    tokens = (await remote.post("/tokenize", {"model": "demo", "prompt": "What is 3 + 4?"}))[
        "tokens"
    ]
    settings = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "logprobs": 0}
    settings["return_weight_versions"] = True
    running = asyncio.create_task(remote.generate(tokens, settings))
    while not (await remote.http.get("/load")).json()["server_load"]:
        await asyncio.sleep(0.01)
    assert (await remote.http.get("/get_world_size", headers=KEY)).json() == {"world_size": 1}
    await remote.post("/pause", mode="keep", clear_cache="false")
    assert (await remote.http.get("/is_paused", headers=KEY)).json() == {"is_paused": True}
    await remote.post("/admin/weights", {"path": str(trained), "version": "step-1"})
    await remote.post("/resume")
    choice, logprobs = await running
    assert len(choice["token_ids"]) == len(logprobs) == 400  # frozen, not lost
    sent = await remote.put("again", trained.read_bytes())
    assert (await remote.http.get("/weight_info", headers=KEY)).json()["digest"] == sent["digest"]
    refused = await remote.http.put(UPDATE, params={"version": "x"}, content=b"x", headers=KEY)
    assert refused.status_code == 409 and "'again' is begun" in refused.text
    assert (await remote.post("/admin/weights", {"version": "again"}))["version"] == "again"
    await remote.put("left", trained.read_bytes())
    assert (await remote.http.delete(UPDATE, headers=KEY)).status_code == 200
    left = await remote.http.post("/admin/weights", json={}, headers=KEY)
    assert left.status_code == 409 and "no update is begun" in left.text
    refused = await remote.http.put(UPDATE, params={"version": "x"}, content=b"x", headers=KEY)
    assert refused.status_code == 400 and "pickles" in refused.text
    wanted = {"model": "demo", "token_ids": tokens, "weight_version": "step-1"}
    for version, status in (("again", 200), ("step-1", 409)):
        body = {**wanted, "weight_version": version, "sampling_params": {"max_tokens": 2}}
        answer = await remote.http.post("/inference/v1/generate", json=body)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "weight_version"
    *_, last = choice["weight_versions"]
    assert (last["version"], last["end"]) == ("step-1", 400)
    shown = await remote.post("/detokenize", {"model": "demo", "tokens": choice["token_ids"]})
    assert isinstance(shown["prompt"], str)
    await remote.post("/reset_prefix_cache", {"reset_running_requests": False})
    await remote.post("/sleep", {"level": 1, "tags": ["kv_cache"]})
    assert (await remote.http.get("/is_sleeping", headers=KEY)).json()["is_sleeping"]
    await remote.post("/wake_up", {"tags": ["kv_cache"]})
    assert len((await remote.generate(tokens, {"max_tokens": 2, "logprobs": 0}))[1]) <= 2
    for path, body, says in (
        ("/update_weights_from_tensor", {}, "safetensors"),
        ("/init_weights_update_group", {**GROUP, "backend": "nccl"}, "gloo"),
        ("/begin_weight_update", None, "joins no group"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}, "gloo"),
        ("/start_weight_update", None, "joins no group"),
    ):
        refused = await remote.http.post(path, json=body, headers=KEY)
        assert refused.status_code == 400 and says in refused.json()["error"]["message"]
