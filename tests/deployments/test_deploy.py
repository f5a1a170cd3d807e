"""Deploying: what proxies and deployments that fail say, and the reason out of Serve's report."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve as ray_serve
from ray.exceptions import ActorUnavailableError
from ray.serve import context
from ray.serve.schema import ApplicationStatus

from rayfin.actors.errors import EngineUnavailable, InvalidConfig
from rayfin.deployments import deploy
from rayfin.deployments.deploy import _reason
from rayfin.deployments.edge.listen_options import PLAIN
from rayfin.deployments.serve.preflight import InBackground

REPORT = """Deploying application rayfin failed: Failed to update the deployments ['engine'].
The deployment failed to start 2 times in a row. Error:
  File "replica.py", line 1928, in initialize
RuntimeError: Traceback (most recent call last):
  File "supervisor.py", line 62, in start
    raise error.cause from None
rayfin.actors.errors.{kind}: a request of 100 tokens needs 7 pages: lower max_model_len
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("InvalidConfig", InvalidConfig),
        ("UnsupportedModel", InvalidConfig),
        ("EngineUnavailable", EngineUnavailable),
    ],
)
def test_reason_is_rayfins_own_error(kind: str, expected: type[Exception]) -> None:
    reason = _reason(REPORT.format(kind=kind))
    assert type(reason) is expected
    assert str(reason) == "a request of 100 tokens needs 7 pages: lower max_model_len"


def test_other_failures_are_told_by_their_last_line() -> None:
    reason = _reason("Traceback:\n  File x\nOSError: no space left\n\n")
    assert type(reason) is EngineUnavailable
    assert str(reason) == "the deployment failed: OSError: no space left"


class Proxies(InBackground):
    """Those that have failed, or still start."""

    def __init__(self, error: Exception | None) -> None:
        self._failed = error

    @property
    def done(self) -> bool:
        return self._failed is not None

    def result(self) -> None:
        assert self._failed is not None, "nothing may wait for proxies of a failed deployment"
        raise self._failed


def test_proxies_that_cannot_start_are_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them Serve's call to deploy times out, which says nothing."""

    def fail(*_: Any) -> None:
        raise TimeoutError("planted")

    monkeypatch.setattr(deploy, "_deploy", fail)
    application: Any = None
    with pytest.raises(EngineUnavailable, match="its port is taken"):
        deploy._deploy_beside(Proxies(EngineUnavailable("its port is taken")), [], application, "a")
    with pytest.raises(TimeoutError, match="planted"):
        deploy._deploy_beside(Proxies(None), [], application, "a")


def test_proxies_are_waited_for_once_the_application_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve may have replaced one while it started, or have more on other nodes."""
    steps: list[str] = []

    class Client:
        def wait_for_proxies_serving(self, wait_for_applications_running: bool) -> None:
            assert wait_for_applications_running
            steps.append("all")

    class Started(Proxies):
        def result(self) -> None:
            steps.append("first")

    monkeypatch.setattr(deploy, "_deploy", lambda *_: steps.append("deployed"))
    monkeypatch.setattr(context, "_get_global_client", Client)
    application: Any = None
    deploy._deploy_beside(Started(None), [], application, "a")
    assert steps == ["deployed", "first", "all"]
    steps.clear()
    deploy._deploy_on(application, "a")
    assert steps == ["deployed", "all"]


def test_a_proxy_that_serve_replaces_ends_no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve kills one that a slow machine starts too slowly. An error of its own is raised."""
    causes = ["The actor is dead because it was killed by `ray.kill`.", "The port is taken."]

    def start(**_: Any) -> None:
        raise ActorUnavailableError(causes.pop(0), b"0" * 16)

    monkeypatch.setattr(deploy.ray_serve, "start", start)
    deploy._start_proxies("127.0.0.1", 1, PLAIN)
    with pytest.raises(ActorUnavailableError, match="is taken"):
        deploy._start_proxies("127.0.0.1", 1, PLAIN)


class Serve:
    """Ray Serve, with an application that has these states, one after the other."""

    RunTarget = ray_serve.RunTarget

    def __init__(self, *states: ApplicationStatus) -> None:
        self.states = list(states)

    def run_many(self, targets: Any, *, wait_for_applications_running: bool) -> None:
        assert [own.name for own in targets] == ["a"] and not wait_for_applications_running

    def status(self) -> Any:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        found = SimpleNamespace(status=state, message="it cannot", deployments={})
        return SimpleNamespace(applications={"a": found})


STARTS, RUNS = ApplicationStatus.DEPLOYING, ApplicationStatus.RUNNING
FAILED = ApplicationStatus.DEPLOY_FAILED
REFUSAL = InvalidConfig("a request needs 7 pages")


def deployed(
    monkeypatch: pytest.MonkeyPatch, refusals: list[Exception | None], *states: ApplicationStatus
) -> None:
    monkeypatch.setattr(deploy, "ray_serve", Serve(*states))
    monkeypatch.setattr(deploy, "START_POLL_SECONDS", 0.0)
    ahead: Any = [SimpleNamespace(refusal=refusal) for refusal in refusals]
    application: Any = None
    deploy._deploy(application, "a", ahead)


def test_an_application_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    deployed(monkeypatch, [None], STARTS, STARTS, RUNS)
    with pytest.raises(EngineUnavailable, match="the deployment failed: it cannot"):
        deployed(monkeypatch, [None], STARTS, FAILED)


def test_an_engine_that_refuses_its_model_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve would start it again and again meanwhile."""
    with pytest.raises(InvalidConfig) as found:
        deployed(monkeypatch, [None, REFUSAL], STARTS)
    assert found.value is REFUSAL
    deployed(monkeypatch, [REFUSAL], RUNS)
