"""What is known of a grammar before it runs: whether it compiles, and whether it is cheap enough.

``judge`` compiles a grammar in this process, which it may exhaust or kill: offline and in tests the
caller's own, in a server a child of the checker's helper.
"""

import asyncio
import hashlib
import json
import random
import re
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.grammar_limits import limits
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.actors.timing import GRAMMAR_MASK_SECONDS, GRAMMAR_QUICK_SECONDS
from rayfin.deployments.guidance.fields import check_size
from rayfin.deployments.guidance.grammar import Grammar, make_grammar
from rayfin.deployments.guidance.json_text import WHITESPACE
from rayfin.deployments.guidance.schema.lint import MAX_BYTES
from rayfin.deployments.guidance.schema.rewrite import DATE_PATTERNS, closes_names

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from rayfin.deployments.text.tokenizer import Tokenizer

VerdictKind = Literal["ok", "invalid", "unsupported", "unsatisfiable", "too_complex"]

CODES: dict[VerdictKind, str] = {
    "invalid": "invalid_schema",
    "unsupported": "unsupported_schema",
    "unsatisfiable": "unsatisfiable_schema",
    "too_complex": "schema_too_complex",
}
"""Of the errors that refuse a request."""

MOST_REASON = 300  # characters
MAX_VERDICTS = 4096
WALK_TOKENS = 16  # sampled after the first mask
PLAIN_BYTES = 4096  # of a schema that compiles without a fork
HARD_WORDS = frozenset({"pattern", "patternProperties", "allOf", "lark_grammar", "propertyNames"})
"""Keywords whose compilation may take long."""
LITERAL = r"(?:[A-Za-z0-9 _/:,;@#%&=<>~-]|\\[dwDWsS]|\\[^A-Za-z0-9]|\[(?:[^\]\\]|\\.)+\])"
FIXED_PATTERN = re.compile(rf"\^(?P<parts>(?:{LITERAL}(?:\{{[0-9]{{1,2}}\}})?)*)\$")
"""A pattern of characters and classes, each as often as it says: a code, a date, a number."""
FIXED_CHARACTERS = 64  # of what such a pattern matches
CHOICE = re.compile(r'start: "(?:[^"\\]|\\.)*"(?: \| "(?:[^"\\]|\\.)*")*')

TOO_COMPLEX = ("LexerTooComplex", "ParserTooComplex", "MaxTokensTotal", "MaxTokensParser")
EXHAUSTED = (
    "fuel",
    "nested",
    "too large",
    "too many",
    "too complex",
    "limit",
    "determine if regex is empty",
)
"""In what llguidance says of a grammar beyond its limits."""

UNSUPPORTED = (
    "Unimplemented keys",
    "only supported when",
    "not disjoint",
    "not supported",
)
"""In what it says of a part that it cannot enforce."""


class Verdict(NamedTuple):
    """What compiling a grammar has shown."""

    kind: VerdictKind
    reason: str = ""
    quick: bool = False  # it compiles within GRAMMAR_QUICK_SECONDS

    @property
    def label(self) -> str:
        """In metrics."""
        return "invalid" if self.kind == "unsatisfiable" else self.kind

    def check(self, param: str | None) -> None:
        """Raises:
        InvalidRequest: the grammar is refused; ``param`` is where the request has it.
        """
        if self.kind != "ok":
            name = param or "The grammar"
            said = f": {self.reason}" if self.reason else ""
            raise InvalidRequest(f"{name} {_SAID[self.kind]}{said}.", param, CODES[self.kind])


_SAID: dict[VerdictKind, str] = {
    "invalid": "is not valid",
    "unsupported": "has a part that cannot be enforced",
    "unsatisfiable": "cannot be satisfied by any answer",
    "too_complex": "is too complex",
}


class GrammarChecker(Protocol):
    """Says whether grammars may run."""

    max_bytes: int  # of a form in a request

    async def check(self, texts: Iterable[str], param: str | None, tenant: str = "") -> bool:
        """Returns if all of ``texts`` may run: whether all compile within a few milliseconds.

        Raises:
            InvalidRequest: one is refused; ``param`` is where the request has it.
            Overloaded: too many unknown grammars wait.
        """

    async def form(self, outputs: StructuredOutputs, param: str, tenant: str = "") -> Grammar:
        """Returns the grammar of a form that may take long to read; it may run.

        Raises:
            InvalidRequest: as ``make_grammar``, or the grammar is refused.
            Overloaded: too many unknown grammars wait.
        """

    def close(self) -> None:
        """Ends what ``check`` needs."""


class InlineChecker:
    """Compiles in the caller's process: offline, where the caller trusts itself, and in tests."""

    def __init__(self, tokenizer: "Tokenizer | None", max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._tokenizer = tokenizer
        self._verdicts = VerdictCache()

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        from rayfin.actors.grammar_limits import ll_tokenizer_of

        if self._tokenizer is None:
            raise InvalidRequest("structured_outputs need a tokenizer.", "structured_outputs")
        return ll_tokenizer_of(self._tokenizer.inner, ends=sorted(self._tokenizer.eos_token_ids))

    async def check(self, texts: Iterable[str], param: str | None, tenant: str = "") -> bool:
        return self.check_now(texts, param)

    async def form(self, outputs: StructuredOutputs, param: str, tenant: str = "") -> Grammar:
        check_size(outputs, param, self.max_bytes)
        special_tokens = {} if self._tokenizer is None else self._tokenizer.added_ids
        make = partial(make_grammar, special_tokens=special_tokens, max_bytes=self.max_bytes)
        grammar = await asyncio.to_thread(make, outputs, param)
        self.check_now([grammar.text], param)
        return grammar

    def close(self) -> None:
        pass

    def check_now(self, texts: Iterable[str], param: str | None) -> bool:
        """As ``check``, for callers without an event loop."""
        quick = True
        for text in texts:
            digest = self._verdicts.digest(text)
            verdict = self._verdicts.get(digest)
            if verdict is None:
                verdict = judge(self._vocabulary, text)
                self._verdicts.put(digest, verdict)
            verdict.check(param)
            quick = quick and verdict.quick
        return quick


Known = TypeVar("Known")


class DigestCache(Generic[Known]):
    """What was last found out of texts, for one tokenizer and one llguidance."""

    def __init__(self, size: int = MAX_VERDICTS) -> None:
        self._size = size
        self._known: OrderedDict[bytes, Known] = OrderedDict()

    @staticmethod
    def digest(text: str) -> bytes:
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()

    def get(self, digest: bytes) -> Known | None:
        known = self._known.get(digest)
        if known is not None:
            self._known.move_to_end(digest)
        return known

    def put(self, digest: bytes, known: Known) -> None:
        self._known[digest] = known
        self._known.move_to_end(digest)
        while len(self._known) > self._size:
            self._known.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)


VerdictCache = DigestCache[Verdict]
"""Verdicts, by the digests of their grammars."""


def judge(tokenizer: "LLTokenizer", text: str) -> Verdict:
    """Compiles a grammar, takes its first mask and samples a few tokens under its masks.

    The tokens depend on the text alone, so that a verdict does not change.
    """
    from llguidance import LLMatcher

    started = time.process_time()
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits())
    compiled = time.process_time() - started
    if matcher.is_error():
        return _refusal(matcher.get_error())
    draw = random.Random(text)
    for number in range(WALK_TOKENS + 1):
        started = time.process_time()
        mask = matcher.compute_bitmask()
        seconds = time.process_time() - started
        compiled += 0 if number else seconds  # as runners do, with the first mask
        if matcher.is_error():
            return _dead_end(matcher, number)
        if seconds > GRAMMAR_MASK_SECONDS:
            return Verdict("too_complex", "the tokens that it allows take too long to find")
        token = _any_of(mask, draw)
        if token is None:
            return Verdict("unsatisfiable", "after some answers no token is allowed")
        if number == WALK_TOKENS or token in tokenizer.eos_tokens:
            break
        if not matcher.consume_token(token):
            return _dead_end(matcher, number + 1)
        if matcher.is_stopped():
            break
    return Verdict("ok", quick=compiled < GRAMMAR_QUICK_SECONDS)


def _any_of(mask: bytes, draw: random.Random) -> int | None:
    """A token of a mask with a bit for each, or None if there is none."""
    start = draw.randrange(len(mask))
    left = (mask[start:] + mask[:start]).lstrip(b"\0")
    if not left:
        return None
    bits = [bit for bit in range(8) if left[0] >> bit & 1]
    return (start - len(left)) % len(mask) * 8 + draw.choice(bits)


def _dead_end(matcher: "LLMatcher", number: int) -> Verdict:
    """Of a matcher that failed at its mask or token ``number``."""
    error = matcher.get_error()
    if matcher.stop_reason() in TOO_COMPLEX or any(
        f"Stop: {stop}" in error for stop in TOO_COMPLEX
    ):
        return Verdict("too_complex", reason(error))
    if "NoExtension" in error:
        said = "some answers cannot be completed" if number else "no token may be the first"
        return Verdict("unsatisfiable", said)
    return _refusal(error)


def _refusal(error: str) -> Verdict:
    said = reason(error)
    if "Unsatisfiable schema: " in said:
        return Verdict("unsatisfiable", said.partition("Unsatisfiable schema: ")[2])
    if any(word in said for word in EXHAUSTED):
        return Verdict("too_complex", said)
    if any(word in said for word in UNSUPPORTED):
        return Verdict("unsupported", said)
    return Verdict("invalid", said)


def reason(error: str) -> str:
    """What llguidance says, on one line, without the state that it prints."""
    words = error.partition("\n<state>")[0].split()
    return " ".join(words)[:MOST_REASON].rstrip(". ")


# Grammars that compile in a few milliseconds.


def is_plain(text: str) -> bool:
    """Whether a grammar compiles fast, whatever it says: texts to choose from, or a small schema.

    A plain schema has no pattern but of dates and of one short length, no ``allOf`` but of names,
    and no recursion.
    """
    if len(text) > PLAIN_BYTES:
        return False
    if not text.startswith("{"):
        return CHOICE.fullmatch(text) is not None
    try:
        whole = json.loads(text)
    except ValueError:
        return False
    refs: dict[str, set[str]] = {}  # of each place of definitions, those that it names
    return all(_walk_schema(whole, "", refs)) and not _recurs(refs)


def _walk_schema(value: Any, place: str, refs: dict[str, set[str]]) -> Iterator[bool]:
    """Yields whether each part is harmless, and notes references."""
    if isinstance(value, list):
        for item in value:
            yield from _walk_schema(item, place, refs)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name == "allOf" and isinstance(item, list) and all(map(closes_names, item)):
                continue
            if name == "pattern" and isinstance(item, str) and _is_fixed(item):
                continue
            yield name not in HARD_WORDS or item is None
            yield name != "whitespace_pattern" or item == WHITESPACE
            if name == "$ref":
                kind, _, target = str(item).rpartition("/")
                yield kind in ("#/$defs", "#/definitions")
                refs.setdefault(place, set()).add(target)
            elif name in ("$defs", "definitions") and isinstance(item, dict):
                for key, definition in item.items():
                    yield from _walk_schema(definition, key, refs)
            else:
                yield from _walk_schema(item, place, refs)


def _is_fixed(pattern: str) -> bool:
    """Whether a pattern is a date's, or matches texts of one short length: an automaton of it has
    one state for each character."""
    match = FIXED_PATTERN.fullmatch(pattern)
    if match is None:
        return pattern in DATE_PATTERNS
    repeats = re.findall(rf"{LITERAL}(?:\{{([0-9]+)\}})?", match["parts"])
    return sum(int(count or 1) for count in repeats) <= FIXED_CHARACTERS


def _recurs(refs: dict[str, set[str]]) -> bool:
    """Whether a definition leads back to itself. Two with one name count as one."""
    done: set[str] = set()

    def leads_back(place: str, way: tuple[str, ...]) -> bool:
        if place in way:
            return True
        if place in done:
            return False
        back = any(leads_back(target, (*way, place)) for target in refs.get(place, ()))
        done.add(place)
        return back

    return any(leads_back(place, ()) for place in list(refs))
