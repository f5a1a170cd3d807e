"""What is not served is refused in one line that says why."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.models.config import load_config, max_position
from rayfin.actors.runner.models.dtypes import resolve_dtype

Make = Callable[..., Any]
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
REFUSED: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 32, "d_ff": 32, "num_layers": 1},
    "bart": {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1},
    "clip": {},
    "rwkv": {"attention_hidden_size": 32},
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]},
    "moshi": {"head_dim": 8, "ffn_dim": 64, "sliding_window": 8},  # only its decode has a window
    "doge": {"num_experts": 4},  # a mask of its own
    "roberta": {"is_decoder": True},  # its positions start at padding_idx + 1
}


def _line(caught: pytest.ExceptionInfo[InvalidConfig]) -> str:
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    assert caught.value.param == "model"
    return text


@pytest.mark.parametrize("architecture_", REFUSED)
def test_unservable_architectures(architecture_: str, tmp_path: Path, engine_args: Make) -> None:
    config = AutoConfig.for_model(architecture_, **{**SMALL, **REFUSED[architecture_]})
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        ModelRunner(engine_args(tmp_path, load_format="dummy"))
    assert "cannot be served" in _line(caught) or "causal" in _line(caught)


def test_missing_folder(tmp_path: Path, engine_args: Make) -> None:
    with pytest.raises(InvalidConfig) as caught:
        ModelRunner(engine_args(tmp_path / "nowhere"))
    assert "there is no folder" in _line(caught)


def test_unknown_name_without_network(engine_args: Make) -> None:
    with pytest.raises(InvalidConfig) as caught:
        ModelRunner(engine_args("somebody/no-such-model"))
    assert "somebody/no-such-model" in _line(caught)


def test_folder_without_config(tmp_path: Path, engine_args: Make) -> None:
    with pytest.raises(InvalidConfig) as caught:
        ModelRunner(engine_args(tmp_path))
    assert "config.json" in _line(caught)


@pytest.mark.parametrize("text", ["{", "", "[]", "{}", '{"model_type": "no_such_type"}'])
def test_broken_config(text: str, tmp_path: Path, engine_args: Make) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        ModelRunner(engine_args(tmp_path))
    _line(caught)


@pytest.fixture
def copy(tiny_model: Make, tmp_path: Path) -> Path:
    """A llama to spoil."""
    return Path(shutil.copytree(tiny_model("llama").folder, tmp_path / "copy"))


def test_folder_without_safetensors(copy: Path, engine_args: Make) -> None:
    (copy / "model.safetensors").unlink()
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(InvalidConfig) as caught:
        ModelRunner(engine_args(copy))
    assert "safetensors" in _line(caught)


def test_truncated_safetensors(copy: Path, engine_args: Make) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidConfig) as caught:
        ModelRunner(engine_args(copy))
    _line(caught)


def test_missing_tensor(copy: Path, engine_args: Make) -> None:
    """A model with a random matrix in it would answer, and answer rubbish."""
    path = copy / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InvalidConfig) as caught:
        ModelRunner(engine_args(copy))
    assert "model.layers.1.mlp.up_proj.weight" in _line(caught)


def test_tensor_of_another_shape(copy: Path, engine_args: Make) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["intermediate_size"] = 64
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfig) as caught:
        ModelRunner(engine_args(copy))
    assert "of shape [32, 48], its config wants [32, 64]" in _line(caught)


def test_tied_weights_are_not_missing(tmp_path: Path, tiny_models: Any, engine_args: Make) -> None:
    config = tiny_models.tiny_config("llama")
    config.tie_word_embeddings = True
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    ModelRunner(engine_args(tmp_path))


def test_max_position() -> None:
    assert max_position(LlamaConfig(max_position_embeddings=100)) == 100
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 50,
    }
    config = LlamaConfig(max_position_embeddings=100, rope_parameters=longrope, **SMALL)
    assert max_position(config) == 50
    assert max_position(PretrainedConfig()) is None


def test_resolve_dtype(engine_args: Make) -> None:
    config = LlamaConfig(dtype=torch.float16)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype(engine_args("x", dtype="auto"), config, cpu) == torch.float32
    assert resolve_dtype(engine_args("x", dtype="auto"), config, cuda) == torch.float16
    assert resolve_dtype(engine_args("x", dtype="bfloat16"), config, cpu) == torch.bfloat16
    assert resolve_dtype(engine_args("x", dtype="auto"), LlamaConfig(), cuda) == torch.bfloat16
    half = engine_args("x", dtype="float16")
    assert resolve_dtype(half, config, cuda) == torch.float16


def test_float16_is_float32_on_a_cpu(
    tiny_model: Make,
    served: Make,
    request_of: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tiny_model("llama").folder
    expected = served(folder, dtype="float32").run(request_of(0, [3, 7, 11], 8))
    assert not caplog.records
    engine = served(folder, dtype="float16")
    assert engine.run(request_of(0, [3, 7, 11], 8)) == expected
    assert engine.runner._loaded.page_type == torch.float32
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["dtype float16 is computed in float32 on a CPU, which is faster"]


def test_changes_of_the_configuration(copy: Path, engine_args: Make) -> None:
    plain = load_config(engine_args(copy))
    rope = {"rope_type": "linear", "factor": 4.0}
    changes = {"max_position_embeddings": 77, "rope_parameters": rope}
    changed = load_config(engine_args(copy, hf_overrides=changes))
    expected = AutoConfig.from_pretrained(copy, rope_parameters=rope | {"rope_theta": 10000.0})
    assert max_position(changed) == 77
    assert changed.rope_parameters == {**plain.rope_parameters, **rope} == expected.rope_parameters
    assert type(changed) is type(plain) and changed.hidden_size == plain.hidden_size
    with pytest.raises(InvalidConfig, match="hf_overrides"):
        load_config(engine_args(copy, hf_overrides={"hidden_size": "many"}))


def test_a_changed_base_of_rotary_angles_changes_tokens(
    copy: Path, served: Make, request_of: Make
) -> None:
    """As of a checkpoint that says so itself."""
    prompt, changes = list(range(3, 33)), {"rope_theta": 7}
    by_flag = served(copy, hf_overrides=changes).run(request_of(0, prompt, 12))
    before = served(copy).run(request_of(0, prompt, 12))
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"] |= changes
    (copy / "config.json").write_text(json.dumps(config))
    assert by_flag == served(copy).run(request_of(0, prompt, 12)) != before


def test_the_tokenizer_has_a_revision_of_its_own(engine_args: Make) -> None:
    args = engine_args("m", revision="a", download_dir="/models")
    assert args.hub == args.tokenizer_hub == {"revision": "a", "cache_dir": "/models"}
    args = engine_args("m", revision="a", tokenizer_revision="b")
    assert args.tokenizer_hub["revision"] == "b" and "tokenizer_revision=b" in args.identity
