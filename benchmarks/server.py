"""Runs ``rayfin serve`` in another process, for scripts that measure it from outside."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

PATIENCE = 300.0  # seconds to start
RAYFIN = "import sys; from rayfin.deployments.cli.main import main; sys.exit(main())"


def free_ports(count: int) -> list[int]:
    """Returns free ports of 127.0.0.1."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """Runs a server of the built-in model on its own Ray cluster; yields its URL."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "RAY_TMPDIR": folder}
        environment.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-c", RAYFIN, "serve", "--port", str(port), *flags]
        log = Path(folder) / "serve.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            _wait(f"{url}/health", process, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)


def _wait(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(url, timeout=10).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
        time.sleep(0.2)
