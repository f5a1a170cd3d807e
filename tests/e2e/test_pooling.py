"""Embeddings beside completions, while a runner, a scheduler and an ingress are killed."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from ray import serve

from pooling_models import WORDS, add_modules, make_encoder
from rayfin.actors.config import EngineArgs
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.deployments.app import bind_models
from rayfin.deployments.client.engine_names import find_engine
from rayfin.deployments.serve.model_args import several_models
from rayfin.deployments.serve.server_args import ServerArgs

NAME, VECTORS, ENGINE = "pooling", "vectors", "engine-vectors"
EMBEDDERS = 3  # clients; one more asks for tokens
ANSWERS = 2  # of each client after a fault: the second one's request has come after it
DRAW = random.Random(29)
TEXTS = [" ".join(DRAW.choices(WORDS, k=DRAW.randrange(4, 60))) for _ in range(240)]
BODIES: list[dict[str, Any]] = [
    *({"model": VECTORS, "input": TEXTS[first : first + 40]} for first in range(0, 240, 40)),
    *({"model": VECTORS, "input": text} for text in TEXTS[:6]),
]
COMPLETION = {
    "model": "demo",
    "prompt": "The capital of",
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


def vectors_of(reply: httpx.Response) -> list[list[float]]:
    data = reply.json()["data"]
    assert [own["index"] for own in data] == list(range(len(data)))
    return [own["embedding"] for own in data]


def tokens_of(reply: httpx.Response) -> list[int]:
    ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return ids


class Client:
    """Asks one request after the other, and compares each answer with the one of a quiet server."""

    def __init__(
        self,
        http: httpx.Client,
        may_break: threading.Event,
        path: str,
        read: Callable[[httpx.Response], Any],
    ) -> None:
        self._http, self._may_break = http, may_break
        self._path, self._read = path, read
        self.answers = 0
        self.broken = 0  # requests without an answer; each was asked again

    def ask(self, body: dict[str, Any]) -> Any:
        while True:
            try:
                reply = self._http.post(self._path, json=body)
                if reply.status_code == 200:
                    return self._read(reply)
                why = reply.text
            except httpx.TransportError as error:
                why = repr(error)
            assert self._may_break.is_set(), why
            self.broken += 1
            time.sleep(0.1)

    def run(self, over: threading.Event, bodies: list[dict[str, Any]], expected: list[Any]) -> None:
        for body, right in itertools.cycle(zip(bodies, expected, strict=True)):
            if over.is_set():
                return
            assert self.ask(body) == right, body
            self.answers += 1


@pytest.fixture(scope="module")
def site(
    deploy: Callable[..., Any],
    served: str,
    settings: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    folder = make_encoder(tmp_path_factory.mktemp("models") / "bert")
    add_modules(folder, {"pooling_mode": "mean"})
    # Steps of a few texts, so that a body takes several.
    pools = {"model": str(folder), "served_model_name": VECTORS, "max_batch_tokens": 64}
    models = [settings, {"threads": 1, "spare_runners": 0, **pools}]
    server, engine = ServerArgs(), EngineArgs()
    application = bind_models(server, engine, several_models(server, engine, models))
    yield deploy(application, NAME, served, f"/{NAME}")
    serve.delete(NAME)


def scheduler() -> Any:
    """The handle of the embedding engine's SchedulerActor."""
    found = find_engine(NAME, ENGINE)
    assert found is not None
    return found


def runner_pid() -> int:
    (runner,) = ray.get(scheduler().runners.remote())
    pid: int = runner.pid
    return pid


def scheduler_pid() -> int:
    pid: int = ray.get(scheduler().process.remote()).pid
    return pid


def ingress_pid() -> int:
    def own(_: Any) -> int:
        import os

        return os.getpid()

    named = ray.util.list_named_actors(all_namespaces=True)
    prefix = f"SERVE_REPLICA::{NAME}#ingress#"
    (name,) = (each["name"] for each in named if each["name"].startswith(prefix))
    actor: Any = ray.get_actor(name, namespace="serve")
    pid: int = ray.get(actor.__ray_call__.remote(own))
    return pid


def test_nothing_is_lost_and_every_bit_is_right(site: Any, eventually: Callable[..., Any]) -> None:
    """Only the death of the ingress, which holds the connections, makes clients ask again."""
    with site.client() as http, ThreadPoolExecutor(EMBEDDERS + 1) as pool:
        paths = [("/v1/embeddings", vectors_of)] * EMBEDDERS + [("/v1/completions", tokens_of)]
        over, may_break = threading.Event(), threading.Event()
        clients = [Client(http, may_break, *path) for path in paths]
        bodies = [BODIES[place:] + BODIES[:place] for place in range(EMBEDDERS)] + [[COMPLETION]]
        quiet = [
            [client.ask(body) for body in own] for client, own in zip(clients, bodies, strict=True)
        ]
        vectors = {tuple(vector) for answer in quiet[0] for vector in answer}
        assert len(vectors) > len(TEXTS) // 2
        jobs = [
            pool.submit(client.run, over, *work)
            for client, *work in zip(clients, bodies, quiet, strict=True)
        ]

        def answered(beyond: list[int]) -> bool:
            for job in jobs:
                if job.done():
                    job.result()
            return all(
                client.answers >= count + ANSWERS
                for client, count in zip(clients, beyond, strict=True)
            )

        try:
            eventually(lambda: answered([0] * len(clients)), "the clients are served")
            for victim in (runner_pid, scheduler_pid, ingress_pid):
                if victim is ingress_pid:
                    may_break.set()
                pid = victim()
                os.kill(pid, signal.SIGKILL)
                before = [client.answers for client in clients]
                eventually(lambda before=before: answered(before), f"answers after {victim}")
                assert victim() != pid
        finally:
            over.set()
        for job in jobs:
            job.result()
        assert any(client.broken for client in clients), "the ingress was killed too late"

    def settled() -> EngineStats | None:
        stats: EngineStats = ray.get(scheduler().stats.remote())
        return None if stats.running or stats.waiting or stats.pages_held else stats

    eventually(settled, "the engine is idle")
    ray.get(scheduler().check_integrity.remote())
