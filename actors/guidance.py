"""What holds a request's tokens to a form: a grammar, tool calls, the end of a thought.

Only text and token ids, so that it crosses actors and outlives every process: a runner makes its
matchers from it and from the request's tokens.
"""

import hashlib
from dataclasses import dataclass

from rayfin.actors.parts import Need, PartUsage, RequestPart

GRAMMAR_FAILED = "grammar_failed"
"""The code of errors about a grammar."""

NO_END = 2**31 - 1
"""As ``Guidance.ends_from``: ends are sampled only where nothing else is left (``ignore_eos``)."""


@dataclass(slots=True, frozen=True)
class Thinking:
    """The marks between which a model thinks. No grammar holds within them."""

    close: str  # the text that ends a thought
    close_ids: tuple[int, ...]  # its tokens, sampled one by one when the budget is spent
    starts_inside: bool  # the prompt ends within a thought
    open_ids: tuple[int, ...] = ()  # an answer that begins with these begins with a thought
    budget: int | None = None  # tokens of a thought, its marks not counted; None is no limit
    ends_at_call: bool = False  # a call within a thought ends it
    calls: tuple[int, ...] = ()  # marks of calls: one with which the grammar may begin ends it too


@dataclass(slots=True, frozen=True)
class CallGrammar:
    """Tool calls in an otherwise free answer."""

    triggers: tuple[int, ...]  # single tokens; after each of them a call may begin
    grammar: str  # of what follows the trigger, the call's closing mark included
    max_calls: int | None = None  # after them no trigger may be sampled. None is no limit
    marks: tuple[tuple[str, str], ...] = ()
    """Texts that may begin a call where no token does, "" at the start of an answer; and the
    grammar of each and the call behind it."""
    rest: str = ""  # the grammar of what follows the last of ``max_calls``, where marks are texts

    @property
    def grammars(self) -> tuple[str, ...]:
        """The texts that a runner must compile."""
        texts = (self.grammar, *(text for _, text in self.marks), self.rest)
        return tuple(dict.fromkeys(filter(None, texts)))


@dataclass(slots=True, frozen=True)
class Guidance(RequestPart):
    """The rules of one request. A grammar is Lark, or JSON as llguidance reads it."""

    grammar: str = ""  # of the whole answer after its thought; "" lets it be free
    calls: CallGrammar | None = None  # with a free answer only
    forbidden: tuple[int, ...] = ()  # token ids that are never sampled
    thinking: Thinking | None = None
    ends: tuple[int, ...] = ()  # end-of-sequence ids: with a grammar only where it is complete
    ends_from: int = 0  # position of the request from which ends may be sampled (min_tokens)
    names: tuple[str, ...] = ()  # of functions: what is no text is a call once it names one
    quick: bool = False  # its grammars compile in a few milliseconds: no request waits for that

    @property
    def grammars(self) -> tuple[str, ...]:
        """The texts that a runner must compile."""
        called = self.calls.grammars if self.calls is not None else ()
        return (self.grammar, *called) if self.grammar else called

    needs_history = True

    @property
    def needs(self) -> tuple[Need, ...]:
        return tuple(
            Need(hashlib.sha256(text.encode(errors="surrogatepass")).digest(), text)
            for text in self.grammars
        )


@dataclass(slots=True, frozen=True)
class GrammarUsage(PartUsage):
    """What a runner did with grammars since its last result."""

    loaded: int = 0  # compiled grammars that it holds now
    hits: int = 0  # rows that began with a grammar that it had ...
    misses: int = 0  # ... and with one that it had to compile
    compile_seconds: tuple[float, ...] = ()  # of each grammar that it compiled, ahead or in a step
    mask_seconds: tuple[float, ...] = ()  # of each decode step with masks
