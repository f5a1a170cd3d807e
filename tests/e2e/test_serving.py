"""``serve``: from nothing to an address, and back to nothing."""

import json
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

READY = "(Ctrl-C stops it)"
QUESTION = {"messages": [{"role": "user", "content": "What is 37 + 48?"}], "temperature": 0}

Start = Callable[..., Any]


@pytest.fixture
def start(drive: Start, serve_driver: str) -> Start:
    """model, port -> a driver that serves it."""
    return lambda model, port: drive("-c", serve_driver, str(model), str(port))


def ask(port: int, body: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    reply: dict[str, Any] = httpx.post(url, json=body, timeout=120).raise_for_status().json()
    return reply


def run_curl(line: str) -> dict[str, Any]:
    """Runs a curl command as it was printed."""
    done = subprocess.run(f"{line} --silent --fail", shell=True, stdout=subprocess.PIPE, check=True)
    reply: dict[str, Any] = json.loads(done.stdout)
    return reply


def test_from_address_to_ctrl_c(
    start: Start, model: str, port: int, eventually: Callable[..., Any]
) -> None:
    first = start(model, port)
    first.wait_for(READY)
    assert f"http://127.0.0.1:{port}/v1" in first.output
    curl = first.output[first.output.index("  curl") :].split("\n\n")[0]
    reply = run_curl(curl.strip())
    assert reply["model"] == model
    assert "85" in reply["choices"][0]["message"]["content"]

    second = start(model, port)
    assert second.wait() == 2
    assert second.output.splitlines()[-1] == (
        f"error: InvalidConfig: cannot listen on 127.0.0.1:{port}: Address already in use"
    )
    assert "Traceback" not in second.output and not second.relatives()
    assert "85" in ask(port, QUESTION)["choices"][0]["message"]["content"]

    # The stream is not read, waits in the window between replica and proxy, and runs on.
    long = {"n": 4, "temperature": 1, "max_tokens": 1200, "ignore_eos": True}
    more = {"stream": True, "stream_options": {"include_usage": True}}
    body = {**QUESTION, **long, **more, "logprobs": True, "top_logprobs": 20}
    server = f"http://127.0.0.1:{port}/v1"
    with httpx.stream("POST", f"{server}/chat/completions", json=body, timeout=120) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        first.signal(signal.SIGINT, group=True)  # as a terminal does
        eventually(lambda: httpx.get(f"{server}/models").status_code != 200, "a request is refused")
        refused = httpx.get(f"{server}/models")
        assert refused.status_code == 503 and refused.headers["retry-after"]
        *_, usage, end = lines
    assert end == "data: [DONE]"  # running requests finish first
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 4 * 1200
    assert first.wait() == 0
    assert first.output.endswith("Stopped.\n")
    assert "Traceback" not in first.output
    first.wait_until_nothing_is_left()
    with socket.socket() as probe:  # the refused connection was closed by the server
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_bad_folder_is_told_before_anything_starts(start: Start, tmp_path: Path, port: int) -> None:
    missing, hollow = tmp_path / "missing", tmp_path / "hollow"
    hollow.mkdir()
    (hollow / "config.json").write_text('{"model_type": "llama"}')
    expected = {missing: "there is no folder", hollow: "safetensors"}
    drivers = {folder: start(folder, port) for folder in expected}
    for folder, driver in drivers.items():
        assert driver.wait() == 2
        (line,) = driver.output.splitlines()  # so no Ray was started
        assert line.startswith("error: InvalidConfig: ") and str(folder) in line
        assert expected[folder] in line
        assert not driver.relatives()


def test_sigterm_while_loading_leaves_nothing(start: Start, model: str, port: int) -> None:
    driver = start(model, port)
    driver.wait_for("Loading")
    driver.signal(signal.SIGTERM)
    assert driver.wait() == 0
    assert driver.output.splitlines()[-1] == "Stopped."
    driver.wait_until_nothing_is_left()


def test_a_load_that_fails_ends_the_start_with_its_reason(
    drive: Start, model: str, port: int
) -> None:
    """At once: Serve would load the model again, several times."""
    command = "import sys; from rayfin.deployments.cli.main import main; sys.exit(main())"
    flags = ["serve", model, "--port", str(port), "--kv-cache-memory", "20000"]
    driver = drive("-c", command, *flags)
    assert driver.wait() == 2
    last = driver.output.splitlines()[-1]
    assert last.startswith("rayfin: error: ") and "--kv-cache-memory" in last
    assert "Traceback" not in driver.output
    driver.wait_until_nothing_is_left()
