"""The vocabulary that grammars are compiled for, of the three kinds of tokenizers."""

from collections.abc import Callable

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from rayfin.actors.grammar_limits import LIMITS, limits, ll_tokenizer_of

TEXTS = ["hello world, the quick brown fox", "caf\u00e9 na\u00efve 0123456789"]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS,
        BpeTrainer(
            vocab_size=300,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    return backend


def sentencepiece() -> Backend:
    """As Llama 2: a visible space, and bytes as tokens."""
    names = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h", "\u2581h"]
    vocabulary = {name: token for token, name in enumerate(names)}
    merges = [("\u2581", "h")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<s>", byte_fallback=True))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def unigram() -> Backend:
    pieces = ["<s>", "</s>", "\u2581", "\u2581h", "h", "e", "\u2581world"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0))
    backend.add_special_tokens(["</s>"])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def fast(backend: Backend) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def allowed(vocabulary: LLTokenizer, grammar: str) -> list[int]:
    matcher = LLMatcher(vocabulary, grammar, limits=limits())
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    assert not matcher.is_error(), matcher.get_error()
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


@pytest.mark.parametrize("make", [byte_level, sentencepiece, unigram])
def test_tokens_are_what_they_add_to_a_text(make: Callable[[], Backend]) -> None:
    tokenizer = fast(make())
    vocabulary = ll_tokenizer_of(tokenizer)
    space = "\u0120" if make is byte_level else "\u2581"
    h, blank = tokenizer.convert_tokens_to_ids(["h", space])
    one = allowed(vocabulary, 'start: "h" | " "')
    spellings = [f"<0x{ord(character):02X}>" for character in "h "] if make is sentencepiece else []
    assert set(one) == {h, blank, *tokenizer.convert_tokens_to_ids(spellings)}


@pytest.mark.parametrize("make", [byte_level, sentencepiece, unigram])
def test_padding_ids_and_special_tokens_are_never_allowed(make: Callable[[], Backend]) -> None:
    tokenizer = fast(make())
    vocabulary = ll_tokenizer_of(tokenizer, len(tokenizer) + 40)
    anything = allowed(vocabulary, r"start: /(.|\n)*/")
    assert vocabulary.vocab_size == len(tokenizer) + 40
    assert max(anything) < len(tokenizer)
    assert 1 in anything, "the end, where the grammar is complete"
    assert make is unigram or 0 not in anything


def test_several_ends() -> None:
    tokenizer = fast(byte_level())
    vocabulary = ll_tokenizer_of(tokenizer, 0, [0, 1])
    assert set(allowed(vocabulary, 'start: "h"?')) >= {0, 1}
    assert allowed(ll_tokenizer_of(tokenizer), 'start: ""') == [1]


def test_limits() -> None:
    assert {name: getattr(limits(), name) for name in LIMITS} == LIMITS


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_bytes_of_tokens_are_those_of_llguidance(make: Callable[[], Backend]) -> None:
    """They are read from the names, which takes a second less for a large vocabulary."""
    backend = make()
    backend.add_tokens([AddedToken("covid \u00e9", normalized=False)])
    size = backend.get_vocab_size()
    theirs, ours = LLTokenizer(backend.to_str(), n_vocab=size), ll_tokenizer_of(fast(backend))
    for token in range(size):
        assert ours.decode_bytes([token]) == theirs.decode_bytes([token])
