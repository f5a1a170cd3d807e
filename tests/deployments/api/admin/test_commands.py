"""``rayfin status`` and its like, against the routes that they speak to."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from rayfin.actors.messages import Command
from rayfin.deployments.api.app import build_api
from rayfin.deployments.cli import engines, operate
from rayfin.deployments.cli.main import main
from rayfin.deployments.client.engine_client import EngineReport

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(operated: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """A command line -> its exit status, and what it wrote."""

    def connect(base_url: str, headers: dict[str, str], timeout: Any) -> TestClient:
        return TestClient(build_api(operated), base_url, headers=headers)

    monkeypatch.setattr(engines.httpx, "Client", connect)
    monkeypatch.setenv("RAYFIN_ADMIN_API_KEY", "admin-key")

    def command(*words: str) -> tuple[int, str]:
        status = main(words)
        out, err = capsys.readouterr()
        return status, out + err

    return command


def test_status_tells_rates(run: Run, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 102.0])
    monkeypatch.setattr(engines, "monotonic", lambda: next(times))

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        own = engine.reports[0]
        stats = replace(
            own.stats, generation_tokens=60, prefix_queries=120, prefix_hits=50, prompt_tokens=150,
            finished={"stop": 8, "length": 1}, sessions_seated=4, parked=2, session_tokens_again=70,
            pages_read={("p2p", "arrived"): 5, ("p2p", "late"): 1, ("disk", "missing"): 2},
        )  # fmt: skip
        engine.reports[0] = EngineReport.of(own.engine, own.name, stats)

    monkeypatch.setattr(operate, "pause", sleep)
    status, out = run("status", "--once", "--json", "--interval", "0.5")
    assert status == 0
    busy, idle = json.loads(out)["rows"]
    assert busy["state"] == "ready" and idle["state"] == "draining"
    assert busy["output_tokens_per_second"] == 10 and busy["prompt_tokens_per_second"] == 25
    assert busy["requests_per_second"] == 1.5 and busy["prefix_hit_rate"] == 0.75
    assert idle["prefix_hit_rate"] is None
    assert (busy["sessions"], busy["parked"], busy["tokens_recomputed"]) == (4, 2, 70)
    assert (busy["pages_read"], busy["pages_missed"]) == ({"p2p": 5}, 3)


def test_status_as_lines(run: Run) -> None:
    status, out = run("status", "--once", "--interval", "0.05")
    assert status == 0
    assert out.splitlines()[0].startswith("engine 0, state ready, running 2, waiting 3")


def test_an_engine_that_began_anew_has_no_rates_below_nothing() -> None:
    def sample(at: float, steps: int) -> engines.Sample:
        report = EngineReport.of("0", "x", None)
        own = {"engine": "0", "state": "ready", "name": "x", "model": "m"}
        stats = {name: 0 for name in report.stats.__slots__}
        words: dict[str, dict[str, int]] = {"finished": {}, "pages_read": {}}
        return engines.Sample(at, [own | {"stats": stats | words | {"steps": steps}}])

    (row,) = engines.Status.between(sample(1.0, 9), sample(2.0, 2)).rows
    assert row.output_tokens_per_second == 0


def test_drain_waits(run: Run, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    polls = 0

    def sleep(seconds: float) -> None:
        nonlocal polls
        polls += 1
        own = engine.reports[0].stats
        own.running, own.waiting = max(0, own.running - 1), 0

    monkeypatch.setattr(operate, "pause", sleep)
    assert run("drain", "--engine", "0") == (0, "Drained.\n")
    assert polls == 2 and engine.commands == [(Command.DRAIN, "0")]
    assert run("drain", "--undo") == (0, "Accepting requests.\n")
    assert engine.commands[1:] == [(Command.ADMIT, None)]


def test_a_drain_that_takes_too_long_fails(run: Run) -> None:
    status, out = run("drain", "--timeout", "0")
    assert status == 1 and out == "5 requests remain.\n"


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["cache", "reset"], Command.RESET_CACHE),
        (["sleep", "--engine", "1"], Command.SLEEP),
        (["wake"], Command.WAKE),
    ],
)
def test_other_commands(run: Run, engine: Any, words: list[str], command: Command) -> None:
    assert run(*words)[0] == 0
    assert [own for own, _ in engine.commands] == [command]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["wake", "--engine", "7"], "HTTP 404: There is no engine '7'."),
        (["wake", "--admin-api-key", "wrong"], "HTTP 401: Incorrect or missing admin key."),
        (["wake", "--admin-api-key", ""], "--admin-api-key is required"),
    ],
)
def test_mistakes_are_one_line(run: Run, words: list[str], said: str) -> None:
    status, out = run(*words)
    assert status != 0 and out.startswith("rayfin: error: ") and said in out
    assert out.count("\n") == 1


def test_a_server_without_an_operators_key(run: Run, operated: Any) -> None:
    operated.edge.keys = operated.edge.admin_keys = None
    status, out = run("status", "--once")
    assert status == 1 and "has no /admin" in out
