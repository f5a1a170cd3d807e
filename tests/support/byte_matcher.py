"""Matchers over a tokenizer of 256 bytes, and walks through grammars at random."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from rayfin.actors.grammar_limits import limits

END = 256
MARKS = {"<tool>": 257, "</tool>": 258}
CLOSING = b'"]})\n'


class _Bytes:
    """As ``TokenizerWrapper`` reads it: each byte is a token, then the end, then marks."""

    eos_token_id = END
    bos_token_id = None
    tokens = [bytes([i]) for i in range(256)] + [
        b"\xff<end>",
        *(b"\xff" + m.encode() for m in MARKS),
    ]
    special_token_ids = [END, *MARKS.values()]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


def matcher_of(grammar: str) -> LLMatcher:
    return LLMatcher(vocabulary(), grammar, limits=limits(), log_level=0)


def compile_error(grammar: str) -> str:
    return matcher_of(grammar).get_error()


def tokens_of(text: str, marks: Mapping[str, int] = MARKS) -> list[int]:
    """The bytes of a text, with its marks as tokens."""
    for mark, token in marks.items():
        if mark in text:
            before, _, after = text.partition(mark)
            return [*tokens_of(before), token, *tokens_of(after)]
    return list(text.encode())


def accepts(grammar: str, text: str, marks: Mapping[str, int] = MARKS) -> bool:
    """Whether a text is a whole answer of the grammar."""
    matcher = matcher_of(grammar)
    assert not matcher.is_error(), matcher.get_error()
    return _takes(matcher, tokens_of(text, marks))


def accepted(grammar: str, texts: Iterable[str]) -> list[bool]:
    """As ``accepts``, of several texts without marks; the grammar compiles once."""
    first = matcher_of(grammar)
    assert not first.is_error(), first.get_error()
    return [_takes(first.deep_copy(), tokens_of(text, {})) for text in texts]


def _takes(matcher: LLMatcher, tokens: list[int]) -> bool:
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def walk(grammar: str, seed: int, longest: int = 1500) -> str | None:
    """A whole answer, drawn under the masks, or None if it is not at its end in time.

    The answer never runs into an end without one: that is a failure.
    """
    draw = random.Random(seed)
    matcher = matcher_of(grammar)
    assert not matcher.is_error(), matcher.get_error()
    written = bytearray()
    while not matcher.is_stopped():
        allowed = list(_allowed(matcher))
        assert allowed, f"nothing may follow {bytes(written)!r} in {grammar}: {matcher.get_error()}"
        if END in allowed and (len(allowed) == 1 or draw.random() < 0.4):
            return written.decode()
        token = _pick(draw, [t for t in allowed if t != END], len(written) / longest)
        written.append(token)
        assert matcher.consume_token(token), matcher.get_error()
        if len(written) > longest:
            return None
    assert not matcher.is_error(), matcher.get_error()
    return written.decode()


def _pick(draw: random.Random, allowed: Sequence[int], spent: float) -> int:
    closing = [token for token in allowed if token in CLOSING]
    if closing and draw.random() < 0.3 + spent:
        return draw.choice(closing)
    plain = [token for token in allowed if 0x20 < token < 0x7F]
    return draw.choice(plain if plain and draw.random() < 0.95 else allowed)


def _allowed(matcher: LLMatcher) -> Iterator[int]:
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def has_repeated_key(text: str) -> bool:
    repeated = False

    def read(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal repeated
        found = dict(pairs)
        repeated |= len(found) < len(pairs)
        return found

    json.loads(text, object_pairs_hook=read)
    return repeated
