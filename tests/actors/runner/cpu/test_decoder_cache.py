"""--weights-cache: a start that finds its weights reads no checkpoint, and gives the same bits."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file

from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.cpu.decoder_cache import DecoderCache
from rayfin.actors.runner.cpu.weights_cache import SUFFIX
from rayfin.kernels.cpu.kernels import try_kernels

Make = Callable[..., Any]
PROMPT = [3 + 7 * i % 100 for i in range(30)]
MORE = 24
"""Tokens after the prompt, over several doublings of small rotary tables."""

pytestmark = pytest.mark.skipif(try_kernels(1) is None, reason="the CPU kernels are not built")


@pytest.fixture
def checkpoints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that have been read from now on."""
    read: list[str] = []
    real = checkpoint.load_model

    def load(args: Any, *others: Any, **options: Any) -> Any:
        read.append(args.model)
        return real(args, *others, **options)

    monkeypatch.setattr(checkpoint, "load_model", load)
    return read


def answers(engine: Any, request_of: Make) -> tuple[list[int], list[torch.Tensor]]:
    """Its tokens, and the logits that they were drawn from."""
    tokens = engine.run(request_of(0, PROMPT, MORE))[0]
    return tokens, [engine.sampled[0][len(PROMPT) + i] for i in range(MORE)]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8"}),
        ("qwen2", {"quantization": "int4"}),
        ("gemma3_text", {}),
        ("olmo2", {}),
        ("granite", {}),
        ("phi3", {}),
    ],
)
def test_the_second_start_gives_the_same_bits(
    family: str,
    settings: dict[str, Any],
    tiny_model: Make,
    served: Make,
    request_of: Make,
    tmp_path: Path,
    checkpoints: list[str],
) -> None:
    tiny = tiny_model(family)
    expected, logits = answers(served(tiny.folder, **settings), request_of)
    if not settings:
        assert expected == tiny.greedy(PROMPT, MORE)
    for start in range(3):
        checkpoints.clear()
        engine = served(tiny.folder, weights_cache=str(tmp_path / "cache"), **settings)
        assert bool(checkpoints) == (start == 0), "it reads the checkpoint once"
        tokens, own = answers(engine, request_of)
        assert tokens == expected
        assert all(torch.equal(one, other) for one, other in zip(own, logits, strict=True))


def copy_of(tiny: Any, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder)
    return folder


def test_other_weights_are_noticed(
    tiny_model: Make, served: Make, request_of: Make, tmp_path: Path, checkpoints: list[str]
) -> None:
    folder, cache = copy_of(tiny_model("llama"), tmp_path), str(tmp_path / "cache")
    before = answers(served(folder, weights_cache=cache), request_of)
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.5
    save_file(weights, path, {"format": "pt"})
    checkpoints.clear()
    after = answers(served(folder, weights_cache=cache), request_of)
    assert checkpoints and not torch.equal(after[1][0], before[1][0])


def test_a_torn_file_is_made_again(
    tiny_model: Make,
    served: Make,
    request_of: Make,
    tmp_path: Path,
    checkpoints: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, cache = tiny_model("llama").folder, tmp_path / "cache"
    expected = answers(served(folder, weights_cache=str(cache)), request_of)[0]
    (path,) = cache.glob(f"*{SUFFIX}")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for reads in (True, False):
        checkpoints.clear()
        again = answers(served(folder, weights_cache=str(cache)), request_of)[0]
        assert again == expected and bool(checkpoints) == reads
    assert caplog.text.count("is ignored: it has") == 1


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("gpt2", {}, "the model is not fused as a whole"),
        ("llama", {"enable_lora": True}, "adapters find their layers"),
        ("llama", {"load_format": "dummy"}, "they are drawn at random"),
    ],
)
def test_what_is_not_cached_says_so(
    family: str,
    settings: dict[str, Any],
    why: str,
    tiny_model: Make,
    served: Make,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    served(tiny_model(family).folder, weights_cache=str(tmp_path / "cache"), **settings)
    assert f"no weights are cached: {why}" in caplog.text
    assert not list(tmp_path.glob(f"cache/*{SUFFIX}"))


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """The folder of "org/tiny" in a Hub's cache, which has no more than its configuration yet."""
    model = tmp_path / "hub" / "models--org--tiny"
    folder = model / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    return folder


INDEX = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})


@pytest.mark.parametrize(
    "files",
    [
        {"model.safetensors": "a"},
        {
            "model-1.safetensors": "a",
            "model.safetensors.index.json": INDEX,
            "model-2.safetensors": "b",
        },
    ],
)
def test_weights_of_a_name_that_are_not_all_here_have_no_place(
    files: dict[str, str], snapshot: Path, engine_args: Make, tmp_path: Path
) -> None:
    """Another fine-tune of the same shape would be given them."""
    settings = {"weights_cache": str(tmp_path / "cache"), "download_dir": str(tmp_path / "hub")}
    args = engine_args("org/tiny", **settings)
    places = [DecoderCache.of(args, torch.device("cpu"), {})]
    for name, text in files.items():
        (snapshot / name).write_text(text)
        places.append(DecoderCache.of(args, torch.device("cpu"), {}))
    assert [place is None for place in places] == [True] * len(files) + [False]


def test_files_that_no_load_fetches_may_be_missing(
    snapshot: Path, engine_args: Make, tmp_path: Path
) -> None:
    """The Hub's cache lists the whole repository once several files were asked for together."""
    args = engine_args("org/tiny", weights_cache="here", download_dir=str(tmp_path / "hub"))
    (snapshot / "model.safetensors").write_text("a")
    names = ("config.json", "model.safetensors", "README.md")
    listing = {"format_version": 1, "files": {name: {"size": 1, "blob_id": "a"} for name in names}}
    trees = snapshot.parents[1] / "trees"
    trees.mkdir()
    (trees / "abc.json").write_text(json.dumps(listing))
    with pytest.raises(OSError):
        snapshot_download("org/tiny", cache_dir=tmp_path / "hub", local_files_only=True)
    assert DecoderCache.of(args, torch.device("cpu"), {}) is not None


def test_a_name_that_leads_elsewhere_by_now_keeps_nothing(
    snapshot: Path, engine_args: Make, tmp_path: Path
) -> None:
    settings = {"weights_cache": str(tmp_path / "cache"), "download_dir": str(tmp_path / "hub")}
    args = engine_args("org/tiny", **settings)
    (snapshot / "model.safetensors").write_text("a")
    place = DecoderCache.of(args, torch.device("cpu"), {})
    assert place is not None and place.follows(args)
    shutil.copytree(snapshot, snapshot.parent / "def")
    (snapshot.parents[1] / "refs" / "main").write_text("def")
    assert not place.follows(args)


def test_what_decides_tokens_is_the_same_with_and_without(engine_args: Make) -> None:
    """So that ingresses and engines of both find each other."""
    with_cache = engine_args("m", weights_cache="here", weights_cache_gb=1.0)
    assert with_cache.identity == engine_args("m").identity


START = """
import json, sys
from rayfin import LLM, SamplingParams

llm = LLM(**json.loads(sys.argv[1]))
answer = llm.generate([json.loads(sys.argv[2])], SamplingParams(temperature=0, max_tokens=8))
heavy = ("transformers.modeling_utils", "transformers.generation.utils", ".modeling_llama",
    ".configuration_auto", ".configuration_llama", "torch._dynamo")
modelling = [name for name in sys.modules if name.endswith(heavy)]
print(json.dumps([answer[0].outputs[0].token_ids, modelling]))
"""


def test_a_start_from_packed_weights_imports_no_class_of_transformers(
    tiny_model: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    """Its models, its loader, its generation and its configurations take seconds to import."""
    tiny = tiny_model("llama")
    settings = {"weights_cache": str(tmp_path / "cache"), "dtype": "float32"}
    served(tiny.folder, **settings)
    given = {"model": str(tiny.folder), "tokenizer": "demo", **settings}
    more = {"kv_cache_memory": 2**24, "max_model_len": 64}
    done = subprocess.run(
        [sys.executable, "-c", START, json.dumps(given | more), json.dumps(PROMPT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tokens, modelling = json.loads(done.stdout.splitlines()[-1])
    assert tokens == tiny.greedy(PROMPT, 8)
    assert not modelling
