"""Embeddings beside completions, while a runner, a scheduler and an ingress are killed."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray

from pooling_models import WORDS

VECTORS = "vectors"
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


def pid_of(kind: str, vectors: Any) -> int:
    """The process of the embedding engine's runner or scheduler, or of the ingress."""
    if kind == "runner":
        (runner,) = ray.get(vectors.scheduler().runners.remote())
        return int(runner.pid)
    if kind == "scheduler":
        return int(ray.get(vectors.scheduler().process.remote()).pid)

    def own(_: Any) -> int:
        import os

        return os.getpid()

    named = ray.util.list_named_actors(all_namespaces=True)
    prefix = f"SERVE_REPLICA::{vectors.name}#ingress#"
    (name,) = (each["name"] for each in named if each["name"].startswith(prefix))
    actor: Any = ray.get_actor(name, namespace="serve")
    return int(ray.get(actor.__ray_call__.remote(own)))


@pytest.mark.parametrize(
    "victims",
    [
        [],
        pytest.param(
            ["runner", "scheduler", "ingress"],
            marks=pytest.mark.thorough(reason="test_faults.py and test_batches.py kill them"),
        ),
    ],
)
def test_nothing_is_lost_and_every_bit_is_right(
    victims: list[str], site: Callable[[str], Any], eventually: Callable[..., Any]
) -> None:
    """Only the death of the ingress, which holds the connections, makes clients ask again."""
    own = site(VECTORS)
    with own.client() as http, ThreadPoolExecutor(EMBEDDERS + 1) as pool:
        paths = [("/v1/embeddings", vectors_of)] * EMBEDDERS + [("/v1/completions", tokens_of)]
        over, may_break = threading.Event(), threading.Event()
        clients = [Client(http, may_break, *path) for path in paths]
        bodies = [BODIES[place:] + BODIES[:place] for place in range(EMBEDDERS)] + [[COMPLETION]]
        quiet = [
            [client.ask(body) for body in each]
            for client, each in zip(clients, bodies, strict=True)
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
            for victim in victims:
                if victim == "ingress":
                    may_break.set()
                pid = pid_of(victim, own)
                os.kill(pid, signal.SIGKILL)
                before = [client.answers for client in clients]
                eventually(lambda before=before: answered(before), f"answers after {victim}")
                assert pid_of(victim, own) != pid
        finally:
            over.set()
        for job in jobs:
            job.result()
        broken = any(client.broken for client in clients)
        assert broken == ("ingress" in victims), "the ingress was killed too late"
    own.idle()
