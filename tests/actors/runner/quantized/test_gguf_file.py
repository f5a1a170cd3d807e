"""GGUF files on the compiled kernels: the logits and tokens of transformers' own reading."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.gguf_header import read_header
from rayfin.actors.runner.cpu.coded_experts import CodedExperts
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.cpu.stored_config import StoredConfig
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.models.config import load_config, max_position
from rayfin.actors.runner.models.mapped_weights import widen
from rayfin.actors.runner.models.weights import load_model
from rayfin.kernels.cpu.codes import CodedMatrix, Codes
from rayfin.kernels.cpu.kernels import Matrix

pytest.importorskip("gguf")

from gguf_files import HEAD, converted, mixed, plain, write_gguf
from rayfin.actors.runner.quantized import gguf_file
from rayfin.actors.runner.quantized.gguf_blocks import BLOCKS

Make = Callable[..., Any]
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 16))]


def several(name: str) -> str:
    """A type that stays plain, and gate and up projections of unlike ones."""
    types = {"attn_q.": "iq4_xs", "attn_k.": "f16", "attn_v.": "q3_k", "ffn_up.": "q2_k"}
    return next((own for part, own in types.items() if part in name), "q5_k")


CASES = [
    ("llama", mixed, False),
    ("llama", "q4_0", True),
    ("llama", several, False),
    ("qwen2", "q4_1", True),
    ("qwen3", mixed, True),
    ("gemma3", "q5_0", True),
    ("qwen3moe", mixed, False),
]


@pytest.mark.parametrize("family, kind, tied", CASES)
def test_logits_and_tokens(
    family: str,
    kind: Any,
    tied: bool,
    tmp_path: Path,
    served: Make,
    request_of: Make,
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind, family, tied=tied)
    model = plain(path)
    engine = served(converted(path), max_batch_tokens=9)
    tokens = engine.run(*(request_of(key, PROMPTS[key], 6) for key in range(3)), stagger=2)
    for key, prompt in enumerate(PROMPTS):
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False
        )
        assert tokens[key] == made[0, len(prompt) :].tolist()
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[key]])).logits[0]
        largest = float(logits.abs().max())
        for position, sampled in engine.sampled[key].items():
            torch.testing.assert_close(
                sampled, logits[position - 1], atol=1e-4 * largest, rtol=1e-4
            )


def test_what_stays_codes(tmp_path: Path, served: Make) -> None:
    """In one decoder: values of another type lie beside queries and keys, a tied table once."""
    path = write_gguf(tmp_path / "tiny.gguf", mixed, "qwen3", tied=True)
    decoder = served(converted(path)).runner._model
    assert isinstance(decoder, CpuDecoder)
    packed = decoder.packed
    assert packed.embedding is packed.head and isinstance(packed.head, CodedMatrix)
    for layer in packed.layers:
        kinds = [_codes(one) for one in (layer.qkv, layer.qkv_rest, layer.gate_up, layer.down)]
        assert kinds == [Codes.LEVELS4, Codes.INT8, Codes.LEVELS4, Codes.INT8]
    size = (Path(converted(path)) / "model.safetensors").stat().st_size
    assert size < 1.05 * path.stat().st_size


def test_packed_weights_are_kept(tmp_path: Path, engine_args: Make) -> None:
    """A start maps them, those that lie beside queries and keys too."""
    path = write_gguf(tmp_path / "tiny.gguf", mixed, "qwen3", tied=True)
    args = engine_args(converted(path), weights_cache=str(tmp_path / "weights"))
    first, second = load(args), load(args)
    assert isinstance(second.config, StoredConfig)
    decoders: list[Any] = [one.model for one in (first, second)]
    tokens = torch.tensor([3, 5])
    for part in ("qkv", "qkv_rest", "gate_up"):
        one, other = (getattr(own.packed.layers[1], part).rows(tokens) for own in decoders)
        assert torch.equal(one, other)
    assert decoders[1].packed.embedding is decoders[1].packed.head


def _codes(matrix: Matrix | None) -> Codes:
    assert isinstance(matrix, CodedMatrix)
    return matrix.codes


def test_experts_stay_codes(tmp_path: Path, served: Make) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", mixed, "qwen3moe")
    model = served(converted(path)).runner._model.transformer
    found = [module for module in model.modules() if isinstance(module, CodedExperts)]
    assert len(found) == 2
    assert all(isinstance(own, CodedMatrix) for one in found for own in one.matrices)


@pytest.mark.parametrize("family, tied", [("llama", False), ("qwen3", True), ("qwen3moe", True)])
def test_dequantized(family: str, tied: bool, tmp_path: Path, engine_args: Make) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", mixed, family, tied=tied)
    args = engine_args(converted(path), quantization="dequantize")
    model: Any = load_model(args, load_config(args), torch.device("cpu"), "sdpa")
    tokens = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        expected = plain(path)(tokens).logits
        torch.testing.assert_close(model(tokens).logits, expected, atol=1e-5, rtol=0)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight.data_ptr() == embedding.weight.data_ptr()) == tied


ALL = [*BLOCKS, mixed]
"""Types of all matrices of a file."""


@pytest.mark.parametrize("kind", ALL)
def test_rows_rounded_to_8_bits(kind: Any, tmp_path: Path, served: Make, request_of: Make) -> None:
    """Those of all layers and of the head, whatever their type."""
    path = write_gguf(tmp_path / "tiny.gguf", kind, "qwen3", tied=True)
    exact, rounded = (served(converted(path), activations=way) for way in ("exact", "int8"))
    for engine in (exact, rounded):
        engine.run(request_of(0, PROMPTS[0], 1))
    decoder = rounded.runner._model
    assert isinstance(decoder, CpuDecoder)
    packed = decoder.packed
    matrices = [packed.embedding, packed.head]
    for layer in packed.layers:
        matrices += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
        matrices += [] if layer.qkv_rest is None else [layer.qkv_rest]
    assert all(isinstance(one, CodedMatrix) and one.rounds_rows for one in matrices)
    first = len(PROMPTS[0])
    one, other = (engine.sampled[0][first] for engine in (exact, rounded))
    assert 1e-5 < float((one - other).norm() / one.norm()) < 0.2


@pytest.mark.parametrize("parts", [1, 2])
def test_the_factors_of_llama_3(parts: int, tmp_path: Path, engine_args: Make) -> None:
    """They divide the frequencies of positions, and may lie in a later part."""
    factors = torch.linspace(1, 8, HEAD // 2)
    extra = {"rope_freqs.weight": factors.numpy()}
    path = write_gguf(tmp_path / "tiny.gguf", "q8_0", extra=extra, parts=parts)
    args = engine_args(converted(path))
    model: Any = load_model(args, load_config(args), torch.device("cpu"), "sdpa")
    plainly = 10000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, plainly / factors)
    assert model.model.rotary_emb.attention_scaling == 1.0


def test_rounding_it_again(tmp_path: Path, served: Make) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "q4_0")
    with pytest.raises(InvalidConfig, match="holds quantized ones .gguf.; leave it out"):
        served(converted(path), quantization="int4")


@pytest.mark.parametrize("kind", ["q8_0", "bf16"])
def test_a_tied_model_without_its_head(kind: str, tmp_path: Path, engine_args: Make) -> None:
    """As an embedding model is loaded."""
    path = write_gguf(tmp_path / "tiny.gguf", kind, "qwen3", tied=True)
    args = engine_args(converted(path))
    model: Any = load_model(
        args, load_config(args), torch.device("cpu"), "sdpa", AutoModel, narrow=True
    )
    widen(model)
    tokens = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        expected = plain(path).model(tokens).last_hidden_state
        found = model(tokens).last_hidden_state
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


LONG = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}


def test_the_factors_of_phi_3(tmp_path: Path) -> None:
    extra = {f"rope_factors_{name}.weight": [one] * 32 for name, one in (("short", 1), ("long", 4))}
    path = write_gguf(tmp_path / "tiny.gguf", "q8_0", "phi3", extra=extra, fields=LONG)
    config = AutoConfig.from_pretrained(converted(path))
    rope = config.rope_parameters
    assert rope["short_factor"] == [1.0] * 32 and rope["long_factor"] == [4.0] * 32
    assert rope["rope_type"] == "longrope" and rope["attention_factor"] == 1.25
    assert max_position(config) == rope["original_max_position_embeddings"] == 64


def test_linear_positions_of_gemma_3(tmp_path: Path) -> None:
    """Those of whole texts, not of windows."""
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    path = write_gguf(tmp_path / "tiny.gguf", "q8_0", "gemma3", tied=True, fields=fields)
    rope = AutoConfig.from_pretrained(converted(path)).rope_parameters
    assert rope["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    assert rope["sliding_attention"]["rope_type"] == "default"


REFUSED = [
    (
        "llama",
        {"extra": {"blk.0.ffn_gate_exps.weight": [[[1.0]]]}},
        "ffn_gate_exps.*no such experts",
    ),
    (
        "llama",
        {"extra": {"blk.1.attn_q.bias": [1.0]}},
        r"blk\.1\.attn_q\.bias, and .*no such tensor",
    ),
    ("llama", {"fields": {"rope.scaling.type": "yarn"}}, "positions are scaled by 'yarn'"),
    ("llama", {"extra": {"rope_factors_long.weight": [1.0] * 32}}, "without all that it needs"),
    ("phi3", {"extra": {"rope_freqs.weight": [1.0] * 24}}, "has 24 factors, and the model 32"),
]


@pytest.mark.parametrize("family, options, why", REFUSED)
def test_what_would_be_another_model(family: str, options: Any, why: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "q8_0", family, **options)
    with pytest.raises(ValueError, match=why):
        converted(path)


def test_sizes_that_transformers_reads(tmp_path: Path) -> None:
    """Gemma 4's key length is not the head's size."""

    class Config:
        model_type = "gemma4_text"

        @property
        def head_dim(self) -> int:
            raise RuntimeError("it differs between layers")

    path = write_gguf(tmp_path / "tiny.gguf", "q8_0", "gemma4")
    gguf_file.completed(Config(), read_header(path), [])


def test_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As experts are whose layers have other names."""
    monkeypatch.setattr(gguf_file.Plan, "reads", lambda *_: False)
    path = write_gguf(tmp_path / "whole.gguf", "q8_0", "qwen3moe")
    gguf_file.convert([str(path)], str(tmp_path / "made"))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32)
    tokens = torch.tensor([PROMPTS[2]])
    with torch.inference_mode():
        expected = plain(path)(tokens).logits
        torch.testing.assert_close(model(tokens).logits, expected, atol=0.05, rtol=0.05)
    lacking = write_gguf(tmp_path / "a.gguf", "q8_0", without="blk.1.attn_v.weight")
    with pytest.raises(
        ValueError, match=r"it lacks 1 weights, model\.layers\.1\.self_attn\.v_proj"
    ):
        gguf_file.convert([str(lacking)], str(tmp_path / "none"))
    narrow = write_gguf(tmp_path / "b.gguf", "q8_0", fields={"attention.value_length_mla": 8})
    monkeypatch.setattr(gguf_file, "SIZES", {"attention.value_length_mla": "head_dim"})
    with pytest.raises(ValueError, match=r"it holds .* of shape \[\d+, 256\], its sizes want"):
        gguf_file.convert([str(narrow)], str(tmp_path / "none"))
    first = write_gguf(tmp_path / "c.gguf", "q8_0", parts=2)
    parts = [str(first), str(tmp_path / "c-00002-of-00002.gguf")]
    with pytest.raises(ValueError, match="one file alone; llama-gguf-split --merge"):
        gguf_file.convert(parts, str(tmp_path / "none"))


def test_the_log_names_the_faster_way(
    tmp_path: Path, engine_args: Make, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "q4_0")
    for way, named in (("exact", True), ("int8", False)):
        caplog.clear()
        with caplog.at_level("INFO"):
            load(engine_args(converted(path), activations=way))
        assert ("--activations int8" in caplog.text) == named
