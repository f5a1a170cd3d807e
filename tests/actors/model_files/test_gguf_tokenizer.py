"""Text of GGUF files is split as llama.cpp splits it."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from rayfin.actors.model_files.gguf_tokenizer import (
    FAMILIES,
    SPLITS,
    UNKNOWN,
    end_tokens,
    make_tokenizer,
)

RECORDED: dict[str, Any] = json.loads(
    Path(__file__).with_name("gguf_splits.json").read_text(encoding="utf-8")
)
"""Texts, merges, and digests of the tokens that llama.cpp 0.5.0 makes of the texts, by split."""


def pieces(name: str, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[name].patterns]
    found = pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
    return [piece for piece, _ in found]


LIST = "A list:\n\n1. One 2024"


@pytest.mark.parametrize(
    "name, expected",
    [
        ("smollm", ["A", " list", ":", "\n\n", "1", ".", " One", " ", "2", "0", "2", "4"]),
        ("gpt-2", ["A", " list", ":", "\n", "\n", "1", ".", " One", " 2024"]),
        ("llama-bpe", ["A", " list", ":\n\n", "1", ".", " One", " ", "202", "4"]),
        ("qwen2", ["A", " list", ":\n\n", "1", ".", " One", " ", "2", "0", "2", "4"]),
        ("falcon", ["A", " list", ":", "\n", "\n", "1", ".", " One", " ", "202", "4"]),
        ("deepseek-v3", ["A", " list", ":\n\n", "1", ".", " One", " ", "202", "4"]),
        ("superbpe", ["A list:\n\n", "1", ". One ", "2", "024"]),
        ("afmoe", ["A", " list", ":\n\n", "1", ".", " One", " ", "2", "024"]),
    ],
)
def test_pieces(name: str, expected: list[str]) -> None:
    assert pieces(name, LIST) == expected


@pytest.mark.parametrize("name", [names.split()[0] for names in FAMILIES])
def test_tokens_are_those_of_llama_cpp(name: str) -> None:
    """Of a vocabulary whose merges go across all that is split."""
    merges = RECORDED["merges"]
    merged = [merge.replace(" ", "") for merge in merges]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]
    header = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    tokenizer = make_tokenizer(header | {"tokenizer.ggml.pre": name})
    found = [tokenizer.tokenize(text) for text in RECORDED["texts"]]
    digest = hashlib.sha256(json.dumps(found).encode()).hexdigest()[:32]
    assert digest == RECORDED["digests"][name]


HEADER: dict[str, Any] = {
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "<｜end｜>", "<think>", "<|eot_id|>"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 4, 3],
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 4,
    "tokenizer.chat_template": "plain",
}


def test_tokens_of_any_letters_stay_whole() -> None:
    """transformers spells control tokens with other letters than bytes have."""
    tokenizer = make_tokenizer(HEADER)
    assert tokenizer.encode("ab<｜end｜>a<think><s>") == [2, 4, 0, 5, 3]
    assert tokenizer.decode([2, 4, 5], skip_special_tokens=True) == "ab<think>"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "<｜end｜>")
    assert tokenizer.pad_token is None
    assert end_tokens(HEADER) == [4, 6]
    assert end_tokens(HEADER | {"tokenizer.ggml.eot_token_id": 5}) == [4, 5, 6]


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({}, [0]),
        ({"tokenizer.ggml.add_bos_token": True}, [3, 0]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, [3, 0]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, [0]),
    ],
)
def test_the_first_token(changes: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    from rayfin.actors.model_files.fast_tokenizer import load_fast

    make_tokenizer(HEADER | changes).save_pretrained(tmp_path)
    assert load_fast(str(tmp_path)).encode("a") == expected


def test_words_that_are_tokens_are_not_merged() -> None:
    """Llama 3 has such tokens."""
    header = HEADER | {"tokenizer.ggml.merges": []}
    assert make_tokenizer(header).encode("ab") == [0, 1]
    header["tokenizer.ggml.pre"] = "llama-bpe"
    assert make_tokenizer(header).encode("ab", add_special_tokens=False) == [2]


def test_several_templates_and_an_unknown_split() -> None:
    named = HEADER | {"tokenizer.chat_template.tool_use": "tools", "tokenizer.ggml.pre": "new"}
    tokenizer = make_tokenizer(named)
    assert tokenizer.chat_template == {"default": "plain", "tool_use": "tools"}
    assert tokenizer.init_kwargs[UNKNOWN] == "new"
    assert UNKNOWN not in make_tokenizer(HEADER).init_kwargs
