"""Embeddings over HTTP whose runner and scheduler are killed while they compute."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve

from pooling_models import WORDS, add_modules, make_encoder
from rayfin import LLM
from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs

NAME = f"pooling-{os.getpid()}"
TEXTS = [
    " ".join(random.Random(number).choices(WORDS, k=random.Random(-number).randrange(4, 60)))
    for number in range(500)
]
SETTINGS: dict[str, Any] = {"threads": 1, "spare_runners": 0, "max_batch_tokens": 64}
"""Steps of a few texts each, so that a body takes a while."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_modules(
        make_encoder(tmp_path_factory.mktemp("models") / "bert"), {"pooling_mode": "mean"}
    )


@pytest.fixture(scope="module")
def wanted(folder: Path) -> np.ndarray:
    with LLM(str(folder), **SETTINGS) as llm:
        found: list[Any] = [one.outputs for one in llm.embed(TEXTS, use_tqdm=False)]
    return np.array([own.embedding for own in found])


@pytest.fixture(scope="module")
def site(deploy: Callable[..., Any], served: str, folder: Path) -> Iterator[Any]:
    engine = EngineArgs(model=str(folder), **SETTINGS)
    yield deploy(bind_app(ServerArgs(), engine), NAME, served, "/pooling")
    serve.delete(NAME)


def _pids(site: Any, victim: str) -> list[int]:
    scheduler = site.scheduler()
    if victim == "scheduler":
        return [ray.get(scheduler.process.remote()).pid]
    return [own.pid for own in ray.get(scheduler.runners.remote())]


@pytest.mark.parametrize("victim", ["runner", "scheduler"])
def test_a_body_outlives_what_computes_it(
    site: Any, wanted: np.ndarray, eventually: Callable[..., Any], victim: str
) -> None:
    """Each of 500 texts has its own vector, with the bits of a quiet engine."""
    pids = _pids(site, victim)
    with ThreadPoolExecutor(1) as pool, site.client() as http:
        answer = pool.submit(http.post, "/v1/embeddings", json={"input": TEXTS})
        eventually(lambda: answer.done() or site.stats().waiting, "texts wait")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert not answer.done(), "it was killed too late"
        data = answer.result().raise_for_status().json()["data"]
    assert [own["index"] for own in data] == list(range(len(TEXTS)))
    assert (np.array([own["embedding"] for own in data]) == wanted).all()
    site.idle()
