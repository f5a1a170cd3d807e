"""The tokenizer is the one that ``AutoTokenizer`` makes."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files import fast_tokenizer
from rayfin.actors.model_files.fast_tokenizer import (
    CHOICES,
    REBUILT,
    TRANSFORMERS,
    chosen_class,
    load_fast,
)

CASES = sorted((named, kind) for named, (_, kinds) in CHOICES.items() for kind in kinds)
TEXT = "hello <|im_end|> wörld, 12 times\n\n"


def write(folder: Path, named: str | None, kind: str, **more: Any) -> str:
    """A folder with a byte-level tokenizer, whose files name a class and a model type."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=300,
        special_tokens=["<|im_end|>", "<pad>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["hello world, hello there"], trainer)
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=backend, eos_token="<|im_end|>", chat_template="{{ messages }}")
    fast.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": named} | more
    path.write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return str(folder)


@pytest.mark.parametrize(("named", "kind"), CASES)
def test_it_is_the_one_of_auto_tokenizer(named: str, kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path, named, kind)
    assert chosen_class(folder) is not None
    ours: Any = load_fast(folder)
    own: Any = AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(own)
    assert ours.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()
    assert ours.special_tokens_map == own.special_tokens_map
    assert ours.chat_template == own.chat_template
    assert str(ours.init_kwargs) == str(own.init_kwargs)
    assert ours(TEXT)["input_ids"] == own(TEXT)["input_ids"]


@pytest.mark.parametrize(
    ("named", "kind", "more"),
    [
        ("LlamaTokenizer", "llama", {}),
        (None, "llama", {}),
        ("PreTrainedTokenizerFast", "qwen2", {}),  # transformers takes Qwen2Tokenizer
        ("PreTrainedTokenizerFast", "mistral", {}),
        ("PreTrainedTokenizerFast", "llama", {"added_tokens_decoder": ["a"]}),
        ("PreTrainedTokenizerFast", "llama", {"added_tokens_decoder": {"0": "a"}}),
        ("PreTrainedTokenizerFast", "llama", {"auto_map": {"AutoTokenizer": ["a.B", None]}}),
    ],
)
def test_auto_tokenizer_decides_the_rest(
    named: str | None, kind: str, more: Any, tmp_path: Path
) -> None:
    assert chosen_class(write(tmp_path, named, kind, **more)) is None


def test_other_files_may_decide(tmp_path: Path) -> None:
    folder = write(tmp_path, "PreTrainedTokenizerFast", "llama")
    assert chosen_class(folder) is not None
    (tmp_path / "tekken.json").write_text("{}")
    assert chosen_class(folder) is None
    (tmp_path / "tekken.json").unlink()
    (tmp_path / "tokenizer.json").unlink()
    assert chosen_class(folder) is None


@pytest.mark.parametrize("named", sorted(REBUILT))
def test_rebuilt_classes_are_of_bpe(named: str, tmp_path: Path) -> None:
    """They would lose another kind's vocabulary, or fail."""
    folder = write(tmp_path, named, sorted(CHOICES[named][1])[0])
    assert chosen_class(folder) is not None
    path = tmp_path / "tokenizer.json"
    held = json.loads(path.read_text())
    held["model"] = {"type": "WordLevel", "vocab": held["model"]["vocab"], "unk_token": "<unk>"}
    path.write_text(json.dumps(held))
    assert chosen_class(folder) is None


@pytest.mark.parametrize("added", [["a"], {"0": "a"}])
def test_added_tokens_of_a_wrong_form_are_refused(added: Any, tmp_path: Path) -> None:
    folder = write(tmp_path, "PreTrainedTokenizerFast", "llama", added_tokens_decoder=added)
    with pytest.raises(InvalidConfig, match="Cannot load a tokenizer"):
        load_fast(folder)


def test_only_a_known_release_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices above are compared with the release that is installed."""
    assert transformers.__version__.startswith(TRANSFORMERS)
    folder = write(tmp_path, "PreTrainedTokenizerFast", "llama")
    foreseen = load_fast(folder)(TEXT)["input_ids"]
    monkeypatch.setattr(fast_tokenizer, "TRANSFORMERS", "4.")
    assert chosen_class(folder) is None
    assert load_fast(folder)(TEXT)["input_ids"] == foreseen


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="Cannot load a tokenizer"):
        load_fast(str(tmp_path))
