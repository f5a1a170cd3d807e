"""Bad models are refused before anything starts."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from httpx import ConnectError, ConnectTimeout, ReadTimeout
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from audio_models import AudioModel
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.timing import HUB_SECONDS
from rayfin.deployments.serve import preflight
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.preflight import (
    InBackground,
    check_audio,
    check_model,
    require_files,
    require_room,
)
from rayfin.deployments.serve.server_args import ServerArgs
from whisper_models import make_whisper

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """All that a served model has, but an empty file for weights."""
    backend = Backend(models.WordLevel({"a": 0, "b": 1}, "a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="b").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(b"")
    return tmp_path


def test_served_model_passes(folder: Path) -> None:
    check_model(EngineArgs(model=str(folder)))
    check_model(EngineArgs(model="demo"))


def test_dummy_weights_need_no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    check_model(EngineArgs(model=str(folder), load_format="dummy"))


def test_tokenizer_may_live_elsewhere(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(other / name)
    check_model(EngineArgs(model=str(other), tokenizer=str(folder)))
    with pytest.raises(InvalidConfig, match="tokenizer"):
        check_model(EngineArgs(model=str(other)))


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "holds no config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", '{"model_type": "no-such-model"}', "no-such-model"),
        ("model.safetensors", None, "no .safetensors file"),
        ("tokenizer.json", None, "tokenizer"),
        ("tokenizer.json", "{", "tokenizer"),
        ("generation_config.json", "{", "generation_config.json"),
    ],
)
def test_broken_folder(folder: Path, file: str, text: str | None, message: str) -> None:
    (folder / file).unlink(missing_ok=True)
    if text is not None:
        (folder / file).write_text(text)
    with pytest.raises(InvalidConfig, match=message) as error:
        check_model(EngineArgs(model=str(folder)))
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_of_ctranslate2(tmp_path: Path) -> None:
    """As faster-whisper reads it: it is named for what it is, by each check."""
    (tmp_path / "config.json").write_text('{"alignment_heads": [[1, 0]]}')
    (tmp_path / "model.bin").write_bytes(b"")
    for check in (require_files, check_model):
        with pytest.raises(InvalidConfig, match="a model of CTranslate2 .* safetensors"):
            check(EngineArgs(model=str(tmp_path)))


def test_the_draft_model_is_looked_at_too(folder: Path) -> None:
    check_model(EngineArgs(model=str(folder), spec_model=str(folder)))
    with pytest.raises(InvalidConfig, match="speculative_config model: there is no folder") as got:
        check_model(EngineArgs(model=str(folder), spec_model=str(folder / "none")))
    assert got.value.param == "speculative_config"


def test_the_head_is_looked_at_too(folder: Path, tmp_path: Path) -> None:
    args = EngineArgs(model=str(folder), spec_method="eagle3", spec_model=str(folder))
    with pytest.raises(InvalidConfig, match="not an EAGLE-3 head") as got:
        check_model(args)
    assert got.value.param == "speculative_config"


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=f"there is no folder {tmp_path}/none"):
        check_model(EngineArgs(model=f"{tmp_path}/none"))


def test_architecture_that_is_not_served(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        check_model(EngineArgs(model=str(folder)))


@pytest.mark.parametrize(
    ("server", "engine", "runners"),
    [
        ({}, {}, 1),
        ({"data_parallel_size": 3}, {}, 3),
        ({"data_parallel_size": 3, "prefill_engines": 2}, {}, 5),
        ({"min_engines": 0, "max_engines": 9}, {}, 0),
        ({"min_engines": 2, "max_engines": 9}, {"pipeline_parallel_size": 2}, 4),
        ({}, {"tensor_parallel_size": 3, "pipeline_parallel_size": 2}, 6),
    ],
)
def test_room_for_runners(server: dict[str, Any], engine: dict[str, Any], runners: int) -> None:
    model = ModelArgs(ServerArgs(**server), EngineArgs(**engine))
    require_room([model, model], 2 * runners)
    if runners:
        with pytest.raises(InvalidConfig, match=f"^{2 * runners} runners need a core each"):
            require_room([model, model], 2 * runners - 1)


def test_what_files_say_is_said_at_once(folder: Path) -> None:
    require_files(EngineArgs(model=str(folder)))
    require_files(EngineArgs(model="demo"))
    require_files(EngineArgs(model="org/on-the-hub"))
    with pytest.raises(InvalidConfig, match="there is no folder ./none"):
        require_files(EngineArgs(model="./none"))
    (folder / "model.safetensors").unlink()
    require_files(EngineArgs(model=str(folder), load_format="dummy"))
    with pytest.raises(InvalidConfig, match="holds no .safetensors file"):
        require_files(EngineArgs(model=str(folder)))
    (folder / "config.json").unlink()
    with pytest.raises(InvalidConfig, match="holds no config.json"):
        require_files(EngineArgs(model=str(folder)))


class Clock:
    """The module ``time`` of the checks: its pauses are over at once."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Between tries to reach the Hub, which are not waited for."""
    clock = Clock()
    monkeypatch.setattr(preflight, "time", clock)
    return clock.pauses


def tries(monkeypatch: pytest.MonkeyPatch, *ends: Exception | None) -> None:
    """What comes of the tries to reach the Hub."""
    left = list(ends)

    def ask(url: str, *, timeout: float, endpoint: str) -> None:
        assert url == f"{endpoint}/org/none/resolve/main/config.json" and timeout > 0
        if (end := left.pop(0)) is not None:
            raise end

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", ask)


@pytest.mark.parametrize(("terminal", "seconds"), [(False, HUB_SECONDS), (True, 5.0)])
def test_a_hub_that_cannot_be_reached(
    terminal: bool, seconds: float, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the HTTP library's; a pod waits for its network, a person does not."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        endpoint = f"http://user:secret@{address}"
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        with pytest.raises(InvalidConfig, match=f"and http://{address} cannot be") as got:
            check_model(EngineArgs(model="org/none"))
    assert got.value.param == "model" and "secret" not in str(got.value)
    assert "refused" in str(got.value)
    assert seconds - 2 <= sum(pauses) <= seconds


def test_a_hub_that_is_reached_in_the_end(
    pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries(monkeypatch, *[ConnectError("refused")] * 10, None)
    preflight.require_hub(EngineArgs(model="org/none"))
    assert len(pauses) == 10


@pytest.mark.parametrize(
    "error", [ReadTimeout("slow"), ConnectTimeout("slow"), OSError("404"), ValueError("a proxy")]
)
def test_whatever_else_is_left_to_the_load(
    error: Exception, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow answer is one, and errors of other kinds have better words there."""
    tries(monkeypatch, error)
    preflight.require_hub(EngineArgs(model="org/none"))
    assert not pauses


def test_what_is_here_needs_no_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders, names that are none, and what the Hub's cache holds."""
    tries(monkeypatch)  # the first one would fail
    cache = folder / "cache"
    held = cache / "models--org--none" / "snapshots" / "abc"
    held.mkdir(parents=True)
    (held / "config.json").write_text("{}")
    refs = cache / "models--org--none" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    for name in ("demo", str(folder), "./none", "/none", "a b", "org/none"):
        args = EngineArgs(model=name, download_dir=str(cache))
        preflight.require_hub(args)
    tries(monkeypatch, None)
    preflight.require_hub(EngineArgs(model=str(folder), tokenizer="org/none"))


def test_checks_in_the_background_say_what_they_find() -> None:
    well = InBackground(lambda: None)
    well.result()
    assert well.done

    def fails() -> None:
        raise InvalidConfig("planted", "model")

    with pytest.raises(InvalidConfig, match="planted"):
        InBackground(fails).result()


def test_a_server_starts_without_torch() -> None:
    """The command's process, which starts Ray and Serve, imports neither torch nor transformers."""
    script = (
        "import sys, rayfin.deployments.serve.serving, rayfin.deployments.deploy\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers"} & set(done.stdout.split())


def test_a_model_that_hears_without_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that audio is off, and what to install; of other models it says nothing."""
    AudioModel("voxtral", tmp_path)
    hears = EngineArgs(model=str(tmp_path))
    check_audio(hears)
    monkeypatch.setitem(sys.modules, "soxr", None)
    check_audio(EngineArgs(model=str(tmp_path), language_model_only=True))
    check_audio(EngineArgs(model="demo"))
    assert not caplog.messages
    check_audio(hears)
    (message,) = caplog.messages
    assert "audio is off: soxr is not installed" in message and "rayfin[audio]" in message


def test_a_model_that_only_hears_without_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_whisper(tmp_path)
    check_audio(EngineArgs(model=str(tmp_path)))
    monkeypatch.setitem(sys.modules, "soxr", None)
    with pytest.raises(InvalidConfig, match=r"writes down speech, and soxr is not.*\[audio\]"):
        check_audio(EngineArgs(model=str(tmp_path)))


@pytest.mark.parametrize(
    "config, settings, param",
    [
        (LLAMA | {"quantization_config": {"quant_method": "gguf"}}, {"quantization": "int4"}, ""),
        (
            {"text_config": {"quantization_config": {"quant_method": "awq"}}},
            {"quantization": "int8"},
            "",
        ),
        (LLAMA, {"activations": "fp8"}, "activations"),
        (LLAMA, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        (LLAMA, {"kv_cache_dtype": "fp8_e4m3", "attention": "cpu"}, "kv_cache_dtype"),
    ],
)
def test_what_a_runner_would_refuse_is_refused_at_once(
    config: Any, settings: Any, param: str, folder: Path
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(folder), device="cpu", **settings)
    with pytest.raises(InvalidConfig) as refused:
        require_files(args)  # before Ray is started
    assert refused.value.param == (param or "quantization")


@pytest.mark.parametrize(
    "settings",
    [{"attention": "torch"}, {"quantization": "dequantize"}],
)
def test_settings_that_run_are_left(settings: Any, folder: Path) -> None:
    config = LLAMA | {"quantization_config": {"quant_method": "gguf"}}
    (folder / "config.json").write_text(json.dumps(config))
    fp8 = {} if "quantization" in settings else {"kv_cache_dtype": "fp8"}
    args = EngineArgs(model=str(folder), device="cpu", **fp8, **settings)
    preflight._check_settings(args, str(folder))


def test_windows_has_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for file in ("/dev/nvidiactl", "/dev/dxg", "/dev/null"):
        monkeypatch.setattr(Path, "exists", lambda path, file=file: str(path) == file)
        assert preflight._may_have_gpu() == (file != "/dev/null")


def test_an_unknown_split_of_a_gguf_file_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unknown_split": "future"}))
    (folder / "config.json").write_text(json.dumps(LLAMA))
    preflight._check_tokenizer(EngineArgs(model=str(folder)))
    assert "'future'" in caplog.text and "--tokenizer" in caplog.text
