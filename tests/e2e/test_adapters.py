"""LoRA adapters under Serve: two engines, a swap under load, runners and registry killed."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from peft_adapters import generate, make_adapter
from rayfin.deployments.serve.preflight import DEMO_FOLDER

PROMPT = [5, 9, 33, 77, 20, 11]
SHORT, LONG = 8, 1000
READERS = 4
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SERVE = (
    *("-c", "from rayfin.deployments.cli.main import main; main()"),
    *("serve", "demo", "--threads", "1"),
    *("--dtype", "float32", "--kv-cache-memory", str(64 * 1024**2)),
    *("--data-parallel-size", "2", "--admin-api-key", "operator"),
)


def processes(name: str, folder: Path) -> list[int]:
    """The processes of our own Ray whose title begins with ``ray::name``."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    found = []
    for line in listed.splitlines():
        pid, _, title = line.strip().partition(" ")
        if title.strip().startswith(f"ray::{name}"):
            with suppress(OSError):  # it has ended since
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                found += [int(pid)] if str(folder).encode() in environment else []
    return found


@pytest.fixture
def server(
    drive: Callable[..., Any], port: int, tmp_path: Path, eventually: Callable[..., Any]
) -> Any:
    """(the driver, a client): adapter ``a`` is loaded, ``c`` is in --lora-dir, ``b`` a folder."""
    for seed, name in enumerate(("a", "b", "dir/c")):
        make_adapter(DEMO_FOLDER, tmp_path / name, seed=seed)
    adapters = ("--lora-modules", f"a={tmp_path / 'a'}", "--lora-dir", str(tmp_path / "dir"))
    driver = drive(*SERVE, "--port", str(port), *adapters)
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600)

    def answers() -> bool:
        assert driver.process.poll() is None, driver.output
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    eventually(answers, "the server is up")
    return driver, client


def test_adapters_outlive_what_is_killed(
    server: Any, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    driver, client = server
    expected = {
        name: generate(DEMO_FOLDER, folder, PROMPT, SHORT)
        for name, folder in (
            ("demo", None),
            ("a", tmp_path / "a"),
            ("b", tmp_path / "b"),
            ("c", tmp_path / "dir" / "c"),
        )
    }
    operator = {"Authorization": "Bearer operator"}

    def tokens(model: str, count: int = SHORT) -> list[int]:
        body = {"model": model, "prompt": PROMPT, "max_tokens": count, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True}
        reply = client.post("/v1/completions", json=body | more)
        assert reply.status_code == 200, reply.text
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids

    for name in ("demo", "a", "c") * 3:
        assert tokens(name) == expected[name], name
    body = {"lora_name": "b", "lora_path": str(tmp_path / "b")}
    assert client.post(LOAD, json=body).status_code == 401
    assert client.post(LOAD, json=body, headers=operator).status_code == 200
    assert tokens("b") == expected["b"]

    first = tokens("b", LONG)
    moved = body | {"lora_path": str(tmp_path / "a"), "load_inplace": True}
    over = threading.Event()

    def until_over() -> list[list[int]]:
        """All answers: one or another runs whenever the server is looked at."""
        answers = [tokens("b", LONG)]
        while not over.is_set():
            answers.append(tokens("b", LONG))
        return answers

    with ThreadPoolExecutor(READERS) as pool:
        readers = [pool.submit(until_over) for _ in range(READERS)]
        try:
            eventually(lambda: client.get("/load").json()["server_load"] >= READERS, "all run")
            runners = processes("ModelRunnerActor", driver.folder)
            assert client.post(LOAD, json=moved, headers=operator).status_code == 200
            os.kill(runners[0], signal.SIGKILL)
        finally:
            over.set()
        ends = [end for reader in readers for end in reader.result()]
    swapped = tokens("b", LONG)
    assert swapped[:SHORT] == expected["a"]
    # Each is whole of one version: a stream that came after the swap is of the second.
    assert all(end in (first, swapped) for end in ends)

    (registry,) = processes("AdapterRegistry", driver.folder)
    os.kill(registry, signal.SIGKILL)
    eventually(lambda: registry not in processes("AdapterRegistry", driver.folder), "it is gone")
    for name, as_of in (("a", "a"), ("b", "a"), ("c", "c")):
        assert tokens(name) == expected[as_of]
    again = {"lora_name": "z", "lora_path": str(tmp_path / "b")}
    assert client.post(LOAD, json=again, headers=operator).status_code == 200
    assert tokens("z") == expected["b"]
    assert client.post(UNLOAD, json=again, headers=operator).status_code == 200
    assert client.post("/v1/completions", json={"model": "z", "prompt": "a"}).status_code == 404
