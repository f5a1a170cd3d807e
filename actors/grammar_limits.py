"""How far a grammar may go, and the vocabulary that it is compiled for.

A runner compiles with the same limits as the process that has checked the grammar, so what passes
there passes here. No torch; llguidance loads when it is used.
"""

from collections.abc import Sequence
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
    own = [] if fast.eos_token_id is None else [fast.eos_token_id]
    backend = copy(fast.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    size = max(vocab_size, len(fast))
    return ll_tokenizer_from(backend.to_str(), size, list(ends) or own, fast.bos_token_id)


def ll_tokenizer_from(
    text: str, vocab_size: int, ends: list[int], bos: int | None = None
) -> "LLTokenizer":
    """The same from the JSON text of a tokenizer, without transformers.

    Raises:
        InvalidConfig: grammars cannot use it.
    """
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=ends or None)
    except ValueError:  # a decoder that llguidance does not know, as of a unigram
        pass
    vocabulary: Any = _Vocabulary(text, vocab_size, ends, bos)
    try:
        return LLTokenizer(vocabulary, eos_token=ends or None)
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise InvalidConfig(f"grammars cannot use this tokenizer: {reason}") from error


class _Vocabulary:
    """A vocabulary by what each token adds to a text; what llguidance's ``LLTokenizer`` reads."""

    is_tokenizer_wrapper = True

    def __init__(self, text: str, size: int, ends: list[int], bos: int | None) -> None:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(text)
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        self.eos_token_id = ends[0] if ends else None
        self.bos_token_id = bos
        self.special_token_ids = sorted(added)
        letter = backend.encode("a", add_special_tokens=False).ids[-1:]
        before = len(backend.decode(letter, skip_special_tokens=False))
        self.tokens = [
            backend.decode([*letter, token], skip_special_tokens=False)[before:].encode()
            if token not in added
            else SPECIAL + added[token].content.encode()
            for token in range(size)
        ]

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text if isinstance(text, str) else text.decode(errors="ignore")
        ids: list[int] = self._backend.encode(whole, add_special_tokens=False).ids
        return ids
