"""Ray's ways in: ``rayfin.llm``, ``connect`` and ``AsyncLLM`` as actors, with engines that die."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from rayfin import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    RequestOutputKind,
    SamplingParams,
    connect,
)
from rayfin.actors.processes.registry import NAMESPACE
from rayfin.deployments.client.engine_names import ENGINE, find_engine
from rayfin.llm import build_openai_app

APP = "from-ray"
PROMPTS = [f"What is {place} + {place * 7 % 50}?" for place in range(8)]
LONG = SamplingParams(
    temperature=0, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


def config(name: str, settings: dict[str, Any], **fields: Any) -> dict[str, Any]:
    kwargs = {key: value for key, value in settings.items() if key != "model"}
    return {
        "model_loading_config": {"model_id": name, "model_source": settings["model"]},
        "engine_kwargs": {**kwargs, "device": "cpu"},
        **fields,
    }


@pytest.fixture(scope="module")
def models(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Two models, of which the second one cannot be loaded: its cache has room for nothing."""
    seen = {"env_vars": {"RAYFIN_TEST_SEEN": "yes"}}
    return [
        config("first", settings, runtime_env=seen),
        config("broken", {**settings, "kv_cache_memory": 1}, runtime_env=seen),
    ]


@pytest.fixture(scope="module")
def url(served: str, models: list[dict[str, Any]], eventually: Callable[..., Any]) -> Iterator[str]:
    """The application's address, once its first model answers."""
    application = build_openai_app({"llm_configs": models})
    target = serve.RunTarget(application, name=APP, route_prefix="/from-ray")
    # All of it never runs, with a broken model.
    serve.run_many([target], wait_for_applications_running=False)
    there = f"{served}/from-ray"

    def answers() -> bool:
        body = {"model": "first", "prompt": "a", "max_tokens": 1}
        return httpx.post(f"{there}/v1/completions", json=body, timeout=600).status_code == 200

    eventually(answers, "the first model answers beside a broken one")
    yield there
    serve.delete(APP)  # or Serve starts the broken one again and again


def tokens(outputs: list[Any]) -> list[int]:
    return [token for output in outputs for token in output.outputs[0].token_ids]


async def read(llm: AsyncLLM, prompt: str, first: asyncio.Event) -> list[int]:
    outputs = []
    async with aclosing(llm.generate(prompt, LONG)) as stream:
        async for output in stream:
            outputs.append(output)
            first.set()
    return tokens(outputs)


def expected(solo: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    outputs = solo.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_model_answers_beside_a_broken_one(url: str) -> None:
    with httpx.Client(base_url=url, timeout=600) as http:
        failed = http.post("/v1/completions", json={"model": "broken", "prompt": "a"})
        assert failed.status_code == 503, failed.text
        listed = [card["id"] for card in http.get("/v1/models").json()["data"]]
        assert listed == ["first", "broken"]


def test_every_api_is_there(url: str) -> None:
    asked = {"model": "first", "messages": [{"role": "user", "content": "Hello"}]}
    with httpx.Client(base_url=url, timeout=600) as http:
        for path, body, kind in (
            ("/v1/responses", {"model": "first", "input": "Hello"}, "response"),
            ("/v1/messages", {**asked, "max_tokens": 4}, "message"),
            ("/v1/chat/completions", {**asked, "max_tokens": 4}, "chat.completion"),
        ):
            reply = http.post(path, json=body).raise_for_status().json()
            assert kind in (reply.get("object"), reply.get("type")), reply


def test_variables_reach_every_process_of_a_model(url: str) -> None:
    """Its ingress, its engine's supervisor, the scheduler and the runner."""
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [
        ray.get_actor(own["name"], own["namespace"])
        for own in named
        if own["name"].startswith((f"{APP}/engine-first/", f"SERVE_REPLICA::{APP}#"))
        and "broken" not in own["name"]
    ]
    assert len(ours) >= 4, named
    look = [own.__ray_call__.remote(lambda _: os.environ.get("RAYFIN_TEST_SEEN")) for own in ours]
    assert set(ray.get(look)) == {"yes"}


def test_one_of_two_models_changed_leaves_the_other_as_it_is(
    url: str, models: list[dict[str, Any]], settings: dict[str, Any], eventually: Callable[..., Any]
) -> None:
    """The first one keeps its processes and answers; the broken one is mended."""

    def processes() -> list[Any]:
        scheduler = find_engine(APP, f"{ENGINE}-first")
        asked = [scheduler.process.remote(), scheduler.runners.remote()]
        return list(ray.get(asked))

    def answers(name: str) -> bool:
        body = {"model": name, "prompt": "a", "max_tokens": 1}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=600).status_code == 200

    before = processes()
    changed = [models[0], config("broken", settings, runtime_env=models[0]["runtime_env"])]
    application = build_openai_app({"llm_configs": changed})
    target = serve.RunTarget(application, name=APP, route_prefix="/from-ray")
    serve.run_many([target], wait_for_applications_running=False)
    kept: list[bool] = []

    def mended() -> bool:
        kept.append(answers("first"))
        return answers("broken")

    eventually(mended, "the model that was mended answers")
    assert all(kept) and processes() == before


def test_connected_programs_have_the_same_tokens_though_the_scheduler_dies(
    app: Any, solo: LLM
) -> None:
    async def work() -> list[list[int]]:
        async with await connect(app.name, app.model) as client:
            first = asyncio.Event()
            running = [asyncio.create_task(read(client, prompt, first)) for prompt in PROMPTS]
            await first.wait()
            process = await app.scheduler().process.remote()
            os.kill(process.pid, signal.SIGKILL)
            pieces = [piece async for piece in client.stream("Hello", max_tokens)]
            assert "".join(pieces)
            return list(await asyncio.gather(*running))

    max_tokens = SamplingParams(max_tokens=8)
    assert asyncio.run(work()) == expected(solo)


def test_a_connection_says_what_there_is(app: Any) -> None:
    async def work(*names: Any) -> None:
        await connect(*names)

    with pytest.raises(ValueError, match=f"there is .*'{app.name}'"):
        asyncio.run(work("none"))
    with pytest.raises(ValueError, match=f"it serves {app.model}"):
        asyncio.run(work(app.name, "none"))


def test_handles_have_rays_methods(app: Any) -> None:
    handle = serve.get_app_handle(app.name).options(stream=True)
    body = {"model": app.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    (whole,) = list(handle.chat.remote(body))
    assert whole["choices"][0]["message"]["role"] == "assistant"
    lines = [line for part in handle.chat.remote({**body, "stream": True}) for line in part]
    assert lines[-1] == "data: [DONE]\n\n"
    (counted,) = list(handle.tokenize.remote({"model": app.model, "prompt": "Hello"}))
    assert counted["count"] > 0


def test_an_engine_of_actors_is_replaced(
    cluster: None, settings: dict[str, Any], solo: LLM
) -> None:
    args = AsyncEngineArgs(**settings)

    async def work() -> list[list[int]]:
        async with AsyncLLM.from_engine_args(args, executor="ray") as llm:
            first = asyncio.Event()
            running = [asyncio.create_task(read(llm, prompt, first)) for prompt in PROMPTS]
            await first.wait()
            names = [own["name"] for own in ray.util.list_named_actors(all_namespaces=True)]
            (runner,) = [name for name in names if name.startswith("async-") and "/runner/" in name]
            process = await ray.get_actor(runner, NAMESPACE).process.remote()
            os.kill(process.pid, signal.SIGKILL)
            return list(await asyncio.gather(*running))

    assert asyncio.run(work()) == expected(solo)
