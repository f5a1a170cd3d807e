"""Two models behind one address, of which one goes to zero engines and comes back."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_models
from rayfin.deployments.client.engine_names import find_engines
from rayfin.deployments.serve.model_args import several_models
from rayfin.deployments.serve.server_args import ServerArgs

NAME = "zoo"
PROMPT = "The capital of"
TOKENS = 6


@pytest.fixture(scope="module")
def zoo(deploy: Callable[..., Any], served: str, settings: dict[str, Any]) -> Iterator[Any]:
    rare = {"served_model_name": ["rare", "seldom"], "min_engines": 0, "max_engines": 1}
    models = [settings, {**settings, **rare, "idle_timeout": 2.0, "max_model_len": 256}]
    server, engine = ServerArgs(metrics_alias="vllm"), EngineArgs()
    application = bind_models(server, engine, several_models(server, engine, models))
    yield deploy(application, NAME, served, f"/{NAME}")
    serve.delete(NAME)


def test_both_answer_and_one_sleeps_at_zero(zoo: Any, eventually: Callable[..., Any]) -> None:
    """Both are the same model: what one says is right for the other."""

    def ask(http: httpx.Client, model: str) -> list[int]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        reply = http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == ("rare" if model == "seldom" else model)
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids

    with zoo.client() as http:
        cards = http.get("/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["demo", "rare", "seldom"]
        assert [card["max_model_len"] for card in cards][1:] == [256, 256]
        right = ask(http, "demo")
        assert len(right) == TOKENS and ask(http, "seldom") == right
        eventually(lambda: not find_engines(NAME, "engine-rare"), "the idle model has no engine")
        assert http.get("/health").status_code == 200
        assert ask(http, "demo") == right  # and the other one has not noticed
        assert ask(http, "rare") == right  # an engine was started for it
        assert find_engines(NAME, "engine-rare")
        counts = [
            f'rayfin_e2e_request_latency_seconds_count{{model_name="{model}"}} 2.0'
            for model in ("demo", "rare")
        ]

        def reported() -> bool:
            text = http.get("/metrics").raise_for_status().text
            return all(count in text for count in counts)

        eventually(reported, "the metrics of both are there")
