"""Counts the files of Rayfin that one streamed chat request crosses, process by process.

    python tools/trace/request.py

Starts a server with the demo model, sends one request to warm it up and one that is traced, and
prints the files that ran between its first and its last byte, and the async generators of the
ingress. A background loop of the same process (heartbeats, leases) is counted as well.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx

import rayfin

HERE = Path(__file__).resolve().parent
START_SECONDS = 300
KINDS = {
    "proxy": "ProxyActor",
    "ingress": "ServeReplica:rayfin:ingress",
    "scheduler": "SchedulerActor",
    "runner": "ModelRunnerActor",
}
BODY = {
    "model": "demo",
    "stream": True,
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is 37 + 48?"}],
}


def ask(url: str) -> None:
    """One streamed chat request, read to its end."""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY, timeout=120) as response:
        response.raise_for_status()
        assert "[DONE]" in response.read().decode()


def wait_until_up(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the server did not start")
        time.sleep(0.5)


def traced(folder: Path) -> list[dict[str, list[str]]]:
    """What each process noted of one request."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    package = str(Path(rayfin.__file__).parent)
    paths = [str(HERE), str(Path(package).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RAYFIN_TRACE": str(folder),
        "RAYFIN_TRACE_PACKAGE": package,
    }
    command = [sys.executable, "-m", "rayfin.deployments.cli.main"]
    code = "from rayfin.deployments.cli.main import main; import sys; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "--port", str(port)]
    log = (folder / "log").open("wb")
    with subprocess.Popen(command, env=environment, stdout=log, stderr=log) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_up(url, server)
            ask(url)
            (folder / "on").touch()
            time.sleep(0.5)
            ask(url)
            (folder / "on").unlink()
            time.sleep(2)
        finally:
            server.terminate()
            server.wait(60)
    return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def main() -> int:
    parser = argparse.ArgumentParser(description="Files that one streamed chat request crosses.")
    parser.add_argument("--list", action="store_true", help="print the files as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        notes = traced(Path(folder))
    files: defaultdict[str, set[str]] = defaultdict(set)
    generators: set[str] = set()
    for note in notes:
        kind = next((kind for kind, name in KINDS.items() if name in str(note["process"])), None)
        if kind is not None:
            files[kind] |= set(note["files"])
            generators |= set(note["generators"]) if kind == "ingress" else set()
    for kind in KINDS:
        print(f"{kind:<10} {len(files[kind]):>4} files")
        if options.list:
            print("".join(f"             {name}\n" for name in sorted(files[kind])), end="")
    print(f"{'together':<10} {len(set().union(*files.values())):>4} files")
    print(f"async generators in the ingress: {len(generators)}")
    print("".join(f"  {name}\n" for name in sorted(generators)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
