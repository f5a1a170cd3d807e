"""Loading, end-of-sequence ids, encoding from many threads."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.text.tokenizer import Tokenizer


def test_load_reads_every_end_of_sequence(byte_level: Tokenizer, tmp_path: Path) -> None:
    byte_level.inner.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.eos_token_ids == {0, 7, byte_level.inner.eos_token_id}
    assert loaded.vocab_size == byte_level.vocab_size
    text = "hello <|im_end|> wörld"
    assert loaded.encode(text) == byte_level.inner(text)["input_ids"]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="Cannot load a tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_broken_generation_config_is_refused(byte_level: Tokenizer, tmp_path: Path) -> None:
    byte_level.inner.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(InvalidConfig, match="not valid JSON"):
        Tokenizer.load(tmp_path)


def test_threads_share_a_tokenizer(byte_level: Tokenizer) -> None:
    texts = [f"hello {i} wörld" * 50 for i in range(64)]
    expected = [byte_level.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(byte_level.encode, texts)) == expected


def test_special_tokens_are_skipped_or_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|>b")
    assert byte_level.decode(ids) == "ab"
    assert byte_level.decode(ids, skip_special_tokens=False) == "a<|im_end|>b"
    assert byte_level.longest_token == max(map(len, byte_level.backend.get_vocab()))


def test_threads_load_after_prepare_imported_transformers(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    """In a process of its own: here transformers is imported already."""
    byte_level.inner.save_pretrained(tmp_path)
    program = (
        "import sys; from concurrent.futures import ThreadPoolExecutor\n"
        "from rayfin.deployments.text.tokenizer import Tokenizer\n"
        "Tokenizer.prepare()\n"
        "with ThreadPoolExecutor(4) as pool:\n"
        "    list(pool.map(Tokenizer.load, [sys.argv[1]] * 4))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
