"""A GGUF file is served with the tokens of transformers' own reading of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files import gguf_folder as module
from rayfin.actors.model_files.gguf_folder import gguf_folder, is_gguf

gguf = pytest.importorskip("gguf")

HIDDEN, INNER, LAYERS, HEADS = 64, 96, 2, 4
PARTS = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _byte_tokens() -> list[str]:
    """The letters that stand for bytes in GPT-2's tokenizer."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [*map(chr, plain), *(chr(256 + place) for place in range(len(others)))]


def write_gguf(path: Path, kind: str) -> Path:
    """A tiny Llama with random weights and a tokenizer of bytes."""
    torch.manual_seed(0)
    tokens = [*_byte_tokens(), "ab", "<s>", "</s>"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    type_ = getattr(gguf.GGMLQuantizationType, kind)

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, torch.ones(shape).numpy())
            return
        weight = (torch.randn(shape) * 0.2).numpy()
        writer.add_tensor(name, gguf.quants.quantize(weight, type_), raw_dtype=type_)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        for name, shape in PARTS.items():
            add(f"blk.{layer}.{name}.weight", *shape)
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(module.CACHE, str(tmp_path / "cache"))


@pytest.mark.parametrize("kind, dtype", [("F32", torch.float32), ("Q8_0", torch.bfloat16)])
def test_tokens_are_those_of_transformers(kind: str, dtype: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / f"tiny.{kind}.gguf", kind)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=dtype)
    model.is_quantized = False
    model = model.float()
    prompts = [[72, 101, 108], list(range(40, 70))]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(path), kv_cache_memory=2**22, max_model_len=128, threads=1) as llm:
        said = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        text = llm.generate("Hello", params, use_tqdm=False)[0]
        chat: Any = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)
    for prompt, answer in zip(prompts, said, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
        assert list(answer.outputs[0].token_ids) == expected[0, len(prompt) :].tolist()
    assert text.outputs[0].text
    assert chat[0].outputs[0].text == text.outputs[0].text  # by the file's own template


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "F32")
    folder = gguf_folder(str(path))
    assert (folder / "config.json").is_file()

    def never(*_: Any) -> None:
        raise AssertionError("it is there")

    monkeypatch.setattr(module, "_make", never)
    assert gguf_folder(str(path)) == folder
    path.touch()
    with pytest.raises(AssertionError):
        gguf_folder(str(path))  # another file


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["README.md", "tiny-Q8_0.gguf", "tiny-F32.gguf"]
    path, asked = write_gguf(tmp_path / "tiny-F32.gguf", "F32"), []

    def download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(path)

    module._fetch.cache_clear()
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repository: files)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    folder = gguf_folder("owner/tiny-GGUF:f32")
    assert folder == gguf_folder("owner/tiny-GGUF/tiny-F32.gguf") == gguf_folder(str(path))
    assert folder == gguf_folder("owner/tiny-GGUF:f32")
    assert asked == [("owner/tiny-GGUF", "tiny-F32.gguf")] * 2  # each name once in a process
    with pytest.raises(InvalidConfig, match=r"no GGUF file of Q4_K_M; it has tiny-Q8_0\.gguf, "):
        gguf_folder("owner/tiny-GGUF:Q4_K_M")
    module._fetch.cache_clear()


def test_errors_name_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_gguf("owner/name/file.Q4_K_M.gguf") and is_gguf("owner/name-GGUF:Q4_K_M")
    (tmp_path / "a.gguf").mkdir()
    assert not is_gguf(str(tmp_path / "a.gguf"))  # a folder is one
    assert not is_gguf("owner/name") and not is_gguf("demo") and not is_gguf("/models/x")
    with pytest.raises(InvalidConfig, match=r"there is no file .*none\.gguf"):
        gguf_folder(str(tmp_path / "none.gguf"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, or so it says")
    with pytest.raises(InvalidConfig, match=r"broken\.gguf cannot be read"):
        gguf_folder(str(broken))
    assert not [own for own in (tmp_path / "cache").iterdir() if own.is_dir()]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"rayfin\[gguf\]"):
        gguf_folder(str(broken))
