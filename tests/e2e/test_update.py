"""A new version with another model, under requests."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from ray import serve

from rayfin.actors.config import EngineArgs
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.server_args import ServerArgs

NAME = "moving"
BODY = {"prompt": "The capital of", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
CLIENTS = 3
PAUSE = 0.2  # seconds between a client's requests: what starts needs the processors, too
MORE = 15  # answers in a row once the update is through


class Clients:
    """Ask the same again and again, each in a thread, until they are stopped."""

    def __init__(self, app: Any) -> None:
        self.answers: list[list[int]] = []
        self.failures: list[str] = []
        self._app = app
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._ask_again) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def other_than(self, old: list[int]) -> list[int] | None:
        return next((answer for answer in list(self.answers) if answer != old), None)

    def ask(self) -> None:
        with self._app.client() as http:
            self._ask(http)

    def _ask_again(self) -> None:
        with self._app.client() as http:
            while not self._ending.wait(PAUSE):
                self._ask(http)

    def _ask(self, http: httpx.Client) -> None:
        body = {"model": self._app.model, "return_token_ids": True, **BODY}
        reply = http.post("/v1/completions", json=body)
        if reply.status_code == 200:
            self.answers.append(reply.json()["choices"][0]["token_ids"])
        else:
            self.failures.append(reply.text)


@pytest.fixture
def update(
    deploy: Callable[..., Any], served: str, settings: dict[str, Any]
) -> Iterator[Callable[..., Any]]:
    """Deploys a version whose engines have such settings; returns when it serves."""

    def version(**changed: Any) -> Any:
        application = bind_app(ServerArgs(), EngineArgs(**settings, **changed))
        return deploy(application, NAME, served, f"/{NAME}")

    yield version
    serve.delete(NAME)


def test_another_model_takes_over(
    update: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    """Each answer is one model's, whole; nothing fails; in the end all are the new one's."""
    clients = Clients(update())
    try:
        eventually(lambda: clients.answers or clients.failures, "there are answers")
        assert not clients.failures
        old = clients.answers[0]
        update(load_format="dummy", seed=3)
        new = eventually(lambda: clients.failures or clients.other_than(old), "another one answers")
        assert not clients.failures
        # Both answer for a while: an old engine goes once its last answer has been read.
        eventually(
            lambda: clients.failures or clients.answers[-MORE:] == [new] * MORE, "the new one"
        )
    finally:
        clients.end()
    assert not clients.failures
    assert all(answer in (old, new) for answer in clients.answers)
    clients.ask()
    assert clients.answers[-1] == new
