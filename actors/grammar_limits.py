"""How far a grammar may go, and the vocabulary that it is compiled for.

A runner compiles with the same limits as the process that has checked the grammar, so what passes
there passes here. No torch; llguidance loads when it is used.
"""

import json
import re
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from rayfin.actors.errors import InvalidConfig

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 25_000,
    "max_lexer_states": 30_000,
    "max_grammar_size": 250_000,
}
"""Fields of llguidance's ``LLParserLimits``. No schema of MaskBench's sample needs more."""


SPECIAL = b"\xff"
"""Before the name of a token that is no text, as llguidance writes it."""

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_OF_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip"}

PLAIN = re.compile(r"[\w\s]+")
"""An added token that is words or blanks is text; another one is a mark, which is none."""


def _byte_of() -> dict[str, int]:
    """Builds GPT-2's table of byte-level vocabularies: printable characters are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


BYTE_OF = _byte_of()


def limits() -> "LLParserLimits":
    """The limits of every matcher, with errors that do not quote the grammar."""
    from llguidance import LLParserLimits

    return LLParserLimits(**LIMITS, verbose_errors=False)


def ll_tokenizer_of(fast: Any, vocab_size: int = 0, ends: Sequence[int] = ()) -> "LLTokenizer":
    """The vocabulary of a fast tokenizer of transformers, as grammars see it.

    Takes 0.3 s for 50,000 tokens.

    Args:
        vocab_size: of the model's logits; ids beyond the tokenizer's are never allowed.
        ends: ids that may be sampled where a grammar is complete; () takes the tokenizer's.

    Raises:
        InvalidConfig: grammars cannot use it.
    """
    eos_ids = [] if fast.eos_token_id is None else [fast.eos_token_id]
    backend = copy(fast.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    size = max(vocab_size, len(fast))
    return ll_tokenizer_from(backend.to_str(), size, list(ends) or eos_ids, fast.bos_token_id)


def ll_tokenizer_from(
    text: str, vocab_size: int, ends: list[int], bos: int | None = None
) -> "LLTokenizer":
    """The same from the JSON text of a tokenizer, without transformers.

    Raises:
        InvalidConfig: grammars cannot use it.
    """
    from llguidance import LLTokenizer

    vocabulary: Any = _Vocabulary(text, vocab_size, ends, bos)
    try:
        return LLTokenizer(vocabulary, eos_token=ends or None)
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(f"grammars cannot use this tokenizer: {reason}") from error


class _Vocabulary:
    """A vocabulary by what each token adds to a text; what llguidance's ``LLTokenizer`` reads.

    A token that is a mark is no text, whether or not it is special: its text is spelled by other
    tokens, and the token itself comes only where a grammar names its id.
    """

    is_tokenizer_wrapper = True

    def __init__(self, text: str, size: int, ends: list[int], bos: int | None) -> None:
        from tokenizers import AddedToken, Tokenizer

        backend = Tokenizer.from_str(text)
        added = backend.get_added_tokens_decoder()
        marks = {
            token: content.content
            for token, content in added.items()
            if content.special or not PLAIN.fullmatch(content.content)
        }
        backend.add_special_tokens(
            [AddedToken(mark, special=True, normalized=False) for mark in marks.values()]
        )
        backend.encode_special_tokens = True  # a mark in a text is read as other tokens
        self._backend = backend
        self.eos_token_id = ends[0] if ends else None
        self.bos_token_id = bos
        self.special_token_ids = sorted(marks)
        self.tokens = _bytes_of(backend, text, size)
        for token, mark in marks.items():
            self.tokens[token] = SPECIAL + mark.encode()

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text if isinstance(text, str) else text.decode(errors="ignore")
        ids: list[int] = self._backend.encode(whole, add_special_tokens=False).ids
        return ids


def _bytes_of(backend: Any, text: str, size: int) -> list[bytes]:
    """Returns the bytes that each token adds to a text; b"" for an id without one."""
    from llguidance import LLTokenizer

    known = [b""] * size
    vocabulary = {token: name for name, token in backend.get_vocab().items() if token < size}
    if (read := _reader_of(backend)) is not None:
        added = {token.content for token in backend.get_added_tokens_decoder().values()}
        for token, name in vocabulary.items():
            known[token] = name.encode() if name in added else read(name)
        return known
    try:
        decode = LLTokenizer(text, n_vocab=size).decode_bytes
        for token in vocabulary:
            known[token] = decode([token])
        return known
    except ValueError:  # a decoder that llguidance does not know, as of a unigram
        pass
    letter = backend.encode("a", add_special_tokens=False).ids[-1:]
    before = len(backend.decode(letter, skip_special_tokens=False))
    for token in vocabulary:
        text = backend.decode([*letter, token], skip_special_tokens=False)
        known[token] = text[before:].encode()
    return known


def _reader_of(backend: Any) -> Callable[[str], bytes] | None:
    """Returns a reader of a token's bytes from its name; None for decoders of other kinds."""
    from tokenizers.decoders import ByteLevel

    if isinstance(backend.decoder, ByteLevel):
        return _bytes_of_letters
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = {step["type"]: step for step in decoder.get("decoders", ())}
    blank = steps.get("Replace", {}).get("pattern", {}).get("String")
    if not blank or "ByteFallback" not in steps or steps.keys() - _OF_SENTENCEPIECE:
        return None
    content = steps["Replace"]["content"]

    def read(name: str) -> bytes:
        if match := _BYTE.fullmatch(name):
            return bytes([int(match[1], 16)])
        return name.replace(blank, content).encode()

    return read


def _bytes_of_letters(name: str) -> bytes:
    """Reads the bytes of a token of a byte-level vocabulary."""
    try:
        return bytes([BYTE_OF[letter] for letter in name])
    except KeyError:
        return name.encode()
