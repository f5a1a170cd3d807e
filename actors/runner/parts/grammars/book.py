"""A runner's compiled grammars, by their text, and the vocabulary that they are compiled for."""

import hashlib
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import GrammarFailed, RayfinError
from rayfin.actors.grammar_limits import limits, ll_tokenizer_of
from rayfin.actors.model_files.fast_tokenizer import load_fast
from rayfin.actors.runner.parts.grammars.compile_threads import (
    CompileThread,
    IdleCompiler,
    Task,
    WarmThread,
)
from rayfin.actors.timing import GRAMMAR_BARRED_SECONDS

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

WordArray: TypeAlias = npt.NDArray[np.uint32]
"""A bit for each token, lowest first."""

IDLE = 128
"""Grammars that are kept for requests to come, beside those of running ones."""

MOST_BARRED = 1024  # grammars, the last ones

WORD = 32  # tokens of a word


class Vocabulary:
    """The tokens of a model as grammars see them.

    Args:
        tokens: made by `grammar_limits`.
        known: ids below it are the tokenizer's; logits beyond are padding.
        special: ids that are no text for a parser either.
        size: ids that the model has logits for.
    """

    def __init__(
        self, tokens: "LLTokenizer", known: int, special: frozenset[int], size: int
    ) -> None:
        self.tokens = tokens
        self.special = special
        self.ends = tuple(tokens.eos_tokens)
        self.words = -(-tokens.vocab_size // WORD)
        self.trimmed = size < tokens.vocab_size  # a mask has bits that no logit belongs to
        self.all: WordArray = words_of(range(min(known, size)), self.words)
        self._beyond: dict[str, WordArray] = {}

    @classmethod
    def load(cls, args: EngineArgs, size: int) -> "Vocabulary":
        """That of the engine's tokenizer.

        Raises:
            InvalidConfig: there is none that grammars can use.
        """
        name = args.tokenizer or args.model
        fast = load_fast(name, args.trust_remote_code, **args.tokenizer_hub)
        added = fast.backend_tokenizer.get_added_tokens_decoder()
        special = frozenset(token for token, content in added.items() if content.special)
        return cls(ll_tokenizer_of(fast, size), len(fast), special, size)

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text; of a special one its name."""
        return bytes(self.tokens.decode_bytes([token]))

    def beyond(self, text: str) -> WordArray:
        """Bits [words] of the tokens that begin with ``text`` and go on with more than blanks."""
        if text not in self._beyond:
            pattern = "".join(f"\\x{{{ord(character):x}}}" for character in text)
            within = self._first_mask(rf"start: /{pattern}\s*/")
            longer = self._first_mask(rf"start: /{pattern}\s*[^\s](.|\n)*/")
            self._beyond[text] = longer & ~within
        return self._beyond[text]

    def _first_mask(self, grammar: str) -> WordArray:
        words: WordArray = np.zeros(self.words, np.uint32)
        matcher = new_matcher(self.tokens, grammar)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words


class GrammarBook:
    """Compiles each grammar once. Safe to use from several threads.

    ``prepare`` may run beside steps, ahead of the requests; a step that meets a grammar that is
    not here compiles it, or has done so beside its forward since ``begin``. The least recently
    used go first, never those that are held.
    """

    def __init__(self, load: Callable[[], Vocabulary], idle: int = IDLE) -> None:
        self._load = load
        self._idle = idle
        self._vocabulary: Vocabulary | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._idle_compiler = IdleCompiler["LLMatcher"]()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # failed ones too
        self._warm: WarmThread[LLMatcher] | None = None  # as soon as there is a vocabulary
        self._begun: dict[str, Task[LLMatcher]] = {}
        self._held = Counter[str]()
        self._barred: OrderedDict[bytes, float] = OrderedDict()  # until when, by digest
        self._compile_seconds: list[float] = []  # since they were last taken, as the next two
        self._hits = 0
        self._misses = 0

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, text: str) -> bool:
        return text in self._compiled

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's, loaded when the first grammar comes.

        Raises:
            GrammarFailed: the tokenizer cannot be used.
        """
        if self._vocabulary is None:
            with self._loading:
                if self._vocabulary is None:
                    try:
                        vocabulary = self._load()
                        self._warm = WarmThread()
                        self._vocabulary = vocabulary
                    except RayfinError as error:
                        raise GrammarFailed(str(error)) from error
        return self._vocabulary

    def prepare(self, texts: Iterable[str], at_once: bool = False) -> None:
        """Compiles what is not here yet; loads the vocabulary even where ``texts`` is empty.

        Args:
            at_once: the next step waits for it; else it gives way to steps.

        Raises:
            GrammarFailed: one does not compile; the others may not be compiled.
        """
        vocabulary = self.vocabulary
        for text in texts:
            self._find(text, vocabulary, _at_once if at_once else self._idle_compiler.compile)

    def begin(self, texts: Iterable[str]) -> None:
        """Compiles held ones while the caller goes on; ``matcher`` waits for the end of it.

        Not before there is a vocabulary: then ``matcher`` compiles.
        """
        vocabulary, warm = self._vocabulary, self._warm
        if vocabulary is None or warm is None:
            return
        for text in texts:
            if text not in self._compiled and text not in self._begun:
                self._begun[text] = warm.begin(partial(compiled, vocabulary, text))

    def matcher(self, text: str) -> "LLMatcher":
        """A matcher at the start of the grammar.

        Raises:
            GrammarFailed: it does not compile.
        """
        return self._find(text, self.vocabulary, _at_once).deep_copy()

    def hold(self, texts: Iterable[str]) -> None:
        """Keeps the grammars until as many calls of ``release``."""
        with self._lock:
            for text in texts:
                self._held[text] += 1
                if text in self._compiled or self._held[text] > 1:  # another one has it compiled
                    self._hits += 1
                else:
                    self._misses += 1

    def release(self, texts: Iterable[str]) -> None:
        texts = tuple(texts)
        with self._lock:
            self._held -= Counter(texts)
            for text in texts:
                if text not in self._held and (begun := self._begun.pop(text, None)):
                    begun.cancel()
            self._drop_idle()

    def bar(self, texts: Iterable[str]) -> None:
        """No request begins with these for a while: their masks have held up a step."""
        until = time.monotonic() + GRAMMAR_BARRED_SECONDS
        with self._lock:
            for text in texts:
                self._barred[_digest(text)] = until
            while len(self._barred) > MOST_BARRED:
                self._barred.popitem(last=False)

    def bars(self, texts: Iterable[str]) -> bool:
        """Whether one of them is barred."""
        if not self._barred:
            return False
        now = time.monotonic()
        return any(self._barred.get(_digest(text), now) > now for text in texts)

    def take_counts(self) -> tuple[tuple[float, ...], int, int]:
        """(seconds of each compilation, grammars held that were here, and not) since last time."""
        if not (self._compile_seconds or self._hits or self._misses):
            return (), 0, 0
        with self._lock:
            counts = tuple(self._compile_seconds), self._hits, self._misses
            self._compile_seconds, self._hits, self._misses = [], 0, 0
        return counts

    def _find(
        self,
        text: str,
        vocabulary: Vocabulary,
        run: Callable[[Callable[[], "LLMatcher"]], "LLMatcher"],
    ) -> "LLMatcher":
        with self._lock:
            base = self._compiled.get(text)
            if base is not None:
                self._compiled.move_to_end(text)
        if base is None:
            started = time.perf_counter()
            begun = self._begun.pop(text, None)
            try:
                base = run(lambda: compiled(vocabulary, text)) if begun is None else begun.result()
            except RuntimeError as error:
                why = brief(str(error))
                raise GrammarFailed(f"the grammar cannot be compiled: {why}") from error
            with self._lock:
                waited = time.perf_counter() - started
                self._compile_seconds.append(waited if begun is None else begun.seconds)
                base = self._compiled.setdefault(text, base)
                self._drop_idle()
        if base.is_error():
            raise GrammarFailed(f"the grammar cannot be used: {brief(base.get_error())}")
        return base

    def _drop_idle(self) -> None:
        surplus = len(self._compiled) - len(self._held) - self._idle
        if surplus > 0:
            idle = [text for text in self._compiled if text not in self._held]
            for text in idle[: len(idle) - self._idle]:
                del self._compiled[text]


def new_matcher(tokens: "LLTokenizer", text: str) -> "LLMatcher":
    from llguidance import LLMatcher

    return LLMatcher(tokens, text, log_level=0, limits=limits())


def compiled(vocabulary: Vocabulary, text: str) -> "LLMatcher":
    """The grammar's matcher. Its first mask is made: it warms the lexer, and may fail."""
    base = new_matcher(vocabulary.tokens, text)
    if not base.is_error():
        base.compute_bitmask()
    return base


def words_of(tokens: Iterable[int], words: int) -> WordArray:
    """The bits of the tokens, in ``words`` words."""
    flags = np.zeros(words * WORD, np.uint8)
    flags[np.fromiter(tokens, np.int64)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def brief(error: str) -> str:
    """An error of llguidance in one line."""
    return re.sub(r"\s+", " ", error.removesuffix("<non-verbose/>")).strip()[:300]


def _at_once(work: "Callable[[], LLMatcher]") -> "LLMatcher":
    """Compiles within a step, which waits."""
    return CompileThread(work).result()
