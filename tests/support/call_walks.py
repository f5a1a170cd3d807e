"""A byte-level tokenizer with marks as tokens, and walks through grammars."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rayfin.actors.grammar_limits import limits, ll_tokenizer_of
from rayfin.actors.guidance import Guidance
from rayfin.actors.runner.parts.grammars.book import GrammarBook, Vocabulary
from rayfin.actors.runner.parts.grammars.guided_row import GuidedRow, Phase
from rayfin.deployments.text import tokenizer as text
from rayfin.deployments.text.parsing.format import ReasoningFormat, ToolFormat

END = "<|im_end|>"
_TOKEN = re.compile(r"<[^<>=\s]{2,}>|\[[A-Z_]+\]|<\|\"\|>")


def byte_tokenizer(marks: Sequence[str] = (), special: bool = True) -> text.Tokenizer:
    """A tokenizer of bytes, whose further tokens are ``marks`` and the end of an answer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    added = [AddedToken(mark, special=special) for mark in marks]
    (backend.add_special_tokens if special else backend.add_tokens)(added)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END)  # type: ignore[no-untyped-call]
    return text.Tokenizer(fast)


def tokens_of(row: ToolFormat | ReasoningFormat) -> list[str]:
    """Those of its marks that models have as single tokens."""
    whole = [mark for mark in row.marks if not any(token in mark for token in row.tokens)]
    return [*row.tokens, *(mark for mark in whole if _TOKEN.fullmatch(mark))]


class Walker:
    """Walks through grammars at random, and checks texts against them."""

    def __init__(self, tokenizer: text.Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocabulary: LLTokenizer = ll_tokenizer_of(tokenizer.inner)
        (self.end,) = tokenizer.eos_token_ids
        size, special = tokenizer.vocab_size, frozenset(tokenizer.added_ids.values())
        self.book = GrammarBook(lambda: Vocabulary(self.vocabulary, size, special, size))
        texts = {token: tokenizer.token_text(token) for token in range(tokenizer.vocab_size)}
        self._closing = {t for t, text in texts.items() if t > self.end or text in _CLOSING}
        self._plain = {t for t, text in texts.items() if len(text) == 1 and text.isalnum()}

    def phases(self, guidance: Guidance, tokens: Sequence[int]) -> list[Phase] | None:
        """Those of a runner's row behind each token; None if one of them may not be sampled."""
        row = GuidedRow(replace(guidance, ends=(self.end,)), self.book)
        phases = []
        for token in [*tokens, self.end]:
            words = np.full(self.book.vocabulary.words, 0xFFFFFFFF, np.uint32)
            if row.is_active(10**6):
                row.fill(words, 10**6)
            if not int(words[token // 32]) >> token % 32 & 1:
                return None
            row.accept(token)
            assert row.error is None, row.error
            phases.append(row.phase)
        return phases[:-1]

    def matcher(self, grammar: str) -> LLMatcher:
        """The matcher of a grammar that is valid."""
        matcher = LLMatcher(self.vocabulary, grammar, limits=limits())
        assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
        return matcher

    def accepts(self, grammar: str, tokens: Sequence[int]) -> bool:
        """Whether tokens are a whole answer of the grammar."""
        matcher = self.matcher(grammar)
        whole = matcher.try_consume_tokens(list(tokens)) == len(tokens)
        return whole and matcher.is_accepting()

    def walk(self, grammar: str, seed: int, longest: int = 400) -> list[int] | None:
        """Tokens of a whole answer, or None if it is not at its end in time.

        Texts end soon: what a grammar needs to end is likelier than other tokens.
        """
        rng, matcher, tokens = random.Random(seed), self.matcher(grammar), list[int]()
        while not matcher.is_stopped():
            allowed = self._allowed(matcher)
            if self.end in allowed and (len(allowed) == 1 or rng.random() < 0.3):
                return tokens
            allowed.discard(self.end)
            if not allowed or len(tokens) >= longest:
                return None
            tokens.append(self._pick(rng, allowed))
            assert matcher.consume_token(tokens[-1]), matcher.get_error()
        assert not matcher.is_error(), matcher.get_error()
        return tokens

    def _allowed(self, matcher: LLMatcher) -> set[int]:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = set()
        while mask:
            lowest = mask & -mask
            allowed.add(lowest.bit_length() - 1)
            mask ^= lowest
        return allowed

    def _pick(self, rng: random.Random, allowed: set[int]) -> int:
        closing = allowed & self._closing
        if closing and rng.random() < 0.5:
            return rng.choice(sorted(closing))
        plain = allowed & self._plain
        return rng.choice(sorted(plain if plain and rng.random() < 0.9 else allowed))


_CLOSING = tuple('"]})></')
