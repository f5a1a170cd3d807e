"""Ports are checked before Ray starts, and a stop by a signal ends in order."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.timing import SIGNAL_REPEATS
from rayfin.deployments.serve import serving
from rayfin.deployments.serve.ports import joins_cluster, require_ports
from rayfin.deployments.serve.server_args import ServerArgs


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that something listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def test_a_taken_port_is_refused(taken: int) -> None:
    with pytest.raises(InvalidConfig, match=f"cannot listen on 127.0.0.1:{taken}: Address already"):
        require_ports(ServerArgs(), "127.0.0.1", taken)
    with pytest.raises(InvalidConfig, match="cannot listen on") as caught:
        require_ports(ServerArgs(metrics_port=taken), "127.0.0.1", 1)
    assert caught.value.param in ("port", "metrics_port")
    with pytest.raises(InvalidConfig, match="metrics_port must not be the API's"):
        require_ports(ServerArgs(metrics_port=5), "127.0.0.1", 5)


def test_a_cluster_may_hold_the_port(
    taken: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not joins_cluster()
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert joins_cluster()
    require_ports(ServerArgs(), "127.0.0.1", taken)
    monkeypatch.delenv("RAY_ADDRESS")
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:6379")
    require_ports(ServerArgs(), "127.0.0.1", taken)


def test_the_command_says_so_without_ray(taken: int) -> None:
    code = (
        "import sys; from rayfin.deployments.cli.main import main;"
        f"status = main(['serve', '--port', '{taken}']);"
        "print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules]);"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == "[]\n"
    assert done.stderr == (
        f"rayfin: error: --port: cannot listen on 127.0.0.1:{taken}: Address already in use\n"
    )


@pytest.fixture
def handlers() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("pause", "status"), [(None, 0), (0.0, 0), (2 * SIGNAL_REPEATS, 130)])
def test_status_of_a_stop(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, pause: float | None, status: int
) -> None:
    """One signal, one that repeats it at once, and a second one while the server stops."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ended: list[str] = []

    def serve(*_: object) -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            if pause is not None:
                now[0] += pause
                os.kill(os.getpid(), number)
            ended.append("in order")

    monkeypatch.setattr(serving, "_serve", serve)
    monkeypatch.setattr(serving, "check_model", lambda _: None)
    monkeypatch.setattr(serving, "require_ports", lambda *_: None)
    if status:
        with pytest.raises(KeyboardInterrupt):
            serving.serve(ServerArgs(), EngineArgs(), host="127.0.0.1", port=1)
    else:
        assert serving.serve(ServerArgs(), EngineArgs(), host="127.0.0.1", port=1) == 0
        assert ended == ["in order"]
