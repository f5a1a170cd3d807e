"""New weights for a served model under its streams, on real Ray; runners and coordinator die."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.torch import load_file, save_file

from demo_model.evaluate import MODEL_DIR
from rayfin import LLM, SamplingParams

TRAINER = """
import sys, torch.distributed as dist
from safetensors.torch import load_file
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[1]}", rank=0, world_size=2)
for tensor in load_file(sys.argv[2]).values():
    dist.broadcast(tensor, 0)
sys.stdin.read()
"""
LENGTH = 600
PROMPTS = ["The weights change, and it says: " * 2, "One ", "To be or not to be, "]
ADMIN = {"Authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The demo model's weights, and two of a trainer's."""
    folder = tmp_path_factory.mktemp("steps")
    tensors = load_file(MODEL_DIR / "model.safetensors")
    made = []
    for number in range(3):
        path = folder / f"step-{number}.safetensors"
        scaled = {
            name: own * (1 + 0.02 * number) if own.ndim == 2 and "proj" in name else own
            for name, own in tensors.items()
        }
        save_file(scaled, path, {"format": "pt"})
        made.append(path)
    return made


@pytest.fixture
def restored(app: Any, steps: list[Path]) -> Iterator[None]:
    """Other tests want the demo model's weights."""
    yield
    update(app, steps[0], "restored")


def update(app: Any, path: Path, version: str, **fields: Any) -> Any:
    with app.client() as http:
        body = {"path": str(path), "version": version, **fields}
        answer = http.post("/admin/weights", json=body, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


def state(app: Any) -> Any:
    with app.client() as http:
        return http.get("/admin/weights", headers=ADMIN).json()


async def read(app: Any, prompt: str, seed: int, begun: Callable[[int], None]) -> Any:
    """A stream's tokens, their log probabilities, and which weights made them."""
    tokens, logprobs, versions = list[int](), list[float](), None
    body = {
        **{"prompt": prompt, "temperature": 1.0, "seed": seed, "max_tokens": LENGTH},
        **{"ignore_eos": True, "logprobs": 0},
        **{"return_token_ids": True, "return_weight_versions": True},
    }
    async with app.async_client() as http:
        async for event in app.stream(http, body):
            (choice,) = event["choices"]
            tokens += choice["token_ids"]
            logprobs += choice["logprobs"]["token_logprobs"]
            versions = choice.get("weight_versions", versions)
            begun(len(tokens))
    return prompt, tokens, logprobs, versions


async def streams(app: Any, act: Callable[[], None]) -> list[Any]:
    """Streams, amid which ``act`` is called."""
    ready = asyncio.Event()

    def begun(count: int) -> None:
        if count > 20:
            ready.set()

    readers = [
        asyncio.create_task(read(app, prompt, seed, begun)) for seed, prompt in enumerate(PROMPTS)
    ]
    started = asyncio.create_task(ready.wait())
    await asyncio.wait({started, *readers}, return_when=asyncio.FIRST_COMPLETED)
    assert started.done(), [reader for reader in readers if reader.done()]
    await asyncio.to_thread(act)
    return await asyncio.gather(*readers)


def check(answers: list[Any], folders: dict[str, Path], tmp_path: Path) -> set[str]:
    """Each span's log probabilities are the floats that a fresh engine of its version gives."""
    seen = set()
    for label, path in folders.items():
        model = tmp_path / label
        model.mkdir()
        for own in MODEL_DIR.iterdir():
            if own.suffix != ".safetensors":
                (model / own.name).symlink_to(own)
        (model / "model.safetensors").symlink_to(path)
        with LLM(str(model), threads=1, kv_cache_memory=64 << 20) as fresh:
            for prompt, tokens, logprobs, versions in answers:
                assert len(tokens) == len(logprobs) == LENGTH == versions[-1]["end"]
                ids = fresh.get_tokenizer()(prompt)["input_ids"]
                params = SamplingParams(max_tokens=1, prompt_logprobs=0)
                whole = {"prompt_token_ids": [*ids, *tokens]}
                (scored,) = fresh.generate([whole], params, use_tqdm=False)
                for span in versions:
                    if span["version"] != label:
                        continue
                    seen.add(label)
                    for index in range(span["start"], span["end"]):
                        own = scored.prompt_logprobs[len(ids) + index][tokens[index]]
                        assert own.logprob == logprobs[index], (label, index)
    return seen


def test_under_streams(app: Any, steps: list[Path], restored: None, tmp_path: Path) -> None:
    app.idle()
    before = state(app)
    folders = {before["version"]: steps[0], "step-1": steps[1], "step-2": steps[2]}

    def twice() -> None:
        first = update(app, steps[1], "step-1")
        assert first["how"] == "in place" and first["serial"] == before["serial"] + 1
        (runner,) = ray.get(app.scheduler().runners.remote())
        os.kill(runner.pid, signal.SIGKILL)  # its successor has step-1
        update(app, steps[2], "step-2")

    answers = asyncio.run(streams(app, twice))
    assert check(answers, folders, tmp_path) >= {before["version"], "step-2"}
    now = state(app)
    assert (now["version"], now["behind"], now["paused"]) == ("step-2", [], False)
    app.idle()


def test_a_sleep_of_level_2(
    app: Any, steps: list[Path], restored: None, eventually: Callable[..., Any]
) -> None:
    """No runner is left; what wakes serves what was decided meanwhile, and a stream goes on."""

    def post(path: str) -> None:
        with app.client() as http:
            answer = http.post(path, headers=ADMIN)
        assert answer.status_code == 200, answer.text

    def sleep() -> None:
        runners = ray.get(app.scheduler().runners.remote())
        post("/sleep?level=2")
        assert ray.get(app.scheduler().runners.remote()) == []
        places = [Path(f"/proc/{runner.pid}") for runner in runners]
        # Its memory is free; Ray may take a moment to note the end of its process.
        eventually(lambda: not any(place.exists() for place in places), "the runners are gone")
        post("/wake_up?tags=weights")
        assert ray.get(app.scheduler().runners.remote()) and state(app)["engines"]
        post("/sleep?level=2")
        update(app, steps[1], "asleep")
        post("/wake_up")

    try:
        answers = asyncio.run(streams(app, sleep))
    finally:
        post("/wake_up")
    for _, tokens, _, versions in answers:
        assert len(tokens) == LENGTH and versions[-1]["version"] == "asleep"
    app.idle()


def test_a_group_by_sglangs_calls(app: Any, steps: list[Path], restored: None) -> None:
    """The calls that slime's trainer makes, of which nothing before the last changes anything."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port = own.getsockname()[1]
    command = [sys.executable, "-c", TRAINER, str(port), str(steps[1])]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE)
    before = state(app)

    def post(path: str, **body: Any) -> Any:
        with app.client() as http:
            answer = http.post(path, json=body or None, headers=ADMIN)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def act() -> None:
        post("/pause_generation", mode="retract")
        place = {"master_address": "127.0.0.1", "master_port": port, "backend": "gloo"}
        post("/init_weights_update_group", **place, group_name="slime", world_size=2)
        post("/begin_weight_update")
        tensors = load_file(steps[1])
        bucket: dict[str, Any] = {"names": list(tensors), "group_name": "slime"}
        bucket["dtypes"] = [str(one.dtype).removeprefix("torch.") for one in tensors.values()]
        bucket["shapes"] = [list(one.shape) for one in tensors.values()]
        post("/update_weights_from_distributed", **bucket)
        assert state(app)["version"] == before["version"]
        assert post("/end_weight_update", weight_version="group", flush_cache=True)["success"]
        post("/destroy_weights_update_group")
        post("/continue_generation")

    try:
        answers = asyncio.run(streams(app, act))
    finally:
        trainer.kill()
        trainer.wait()
    for _, tokens, _, versions in answers:
        assert len(tokens) == LENGTH and versions[-1]["version"] == "group"
    name, own = next(iter(load_file(steps[1]).items()))
    read = post("/get_weights_by_name", name=name, truncate_size=2)
    assert read == own[:2].float().tolist()
    app.idle()


def test_what_does_not_fit_changes_nothing(app: Any, steps: list[Path], tmp_path: Path) -> None:
    before = state(app)
    tensors = load_file(steps[1])
    name = next(iter(tensors))
    save_file({key: own for key, own in tensors.items() if key != name}, tmp_path / "x.safetensors")
    with app.client() as http:
        body = {"path": str(tmp_path / "x.safetensors")}
        refused = http.post("/admin/weights", json=body, headers=ADMIN)
        assert refused.status_code == 400 and name in refused.json()["error"]["message"]
        assert http.post("/admin/weights", json=body).status_code == 401
        pickled = http.post("/update_weights_from_tensor", json={}, headers=ADMIN)
        assert pickled.status_code == 400
        called = http.post("/collective_rpc", json={"method": "exec"}, headers=ADMIN)
        assert called.status_code == 400
    assert state(app) == before
