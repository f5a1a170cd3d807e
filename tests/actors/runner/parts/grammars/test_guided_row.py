"""Where a guided request stands and what it may sample: by hand, and from any prefix of tokens."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.actors.errors import GrammarFailed
from rayfin.actors.grammar_limits import LIMITS
from rayfin.actors.guidance import NO_END, CallGrammar, Guidance, Thinking
from rayfin.actors.messages import Int32Array, NewRequest, Sampling
from rayfin.actors.runner.parts.grammars.book import WORD, GrammarBook
from rayfin.actors.runner.parts.grammars.guided_row import GuidedRow, Phase
from rayfin.actors.runner.parts.grammars.masker import GuidanceProcessor
from rayfin.actors.runner.sampling.device_rules import DeviceRules
from rayfin.actors.runner.sampling.processor import Rows

Make = Callable[..., Any]
END, THINK, CLOSE, CALL, CALLED, NEVER = 2, 3, 4, 5, 6, 7
ENDS = (END,)
ONE_WORD = 'start: "abc" | "th"'
JSON = 'start: "{" KEY ":" /[0-9]{1,3}/ "}"\nKEY: "\\"" /[a-c]{1,2}/ "\\""'
OF_A_CALL = f"start: JSON <[{CALLED}]>\nJSON: /\\{{[a-z]{{0,3}}\\}}/"
FORCED = f"start: <[{CALL}]> JSON <[{CALLED}]>\nJSON: /\\{{[a-z]{{0,3}}\\}}/"


@pytest.fixture(scope="module")
def book(tiny_book: Make) -> GrammarBook:
    made: GrammarBook = tiny_book()
    return made


@pytest.fixture(scope="module")
def ids(book: GrammarBook) -> Callable[[str], list[int]]:
    """The tokens of a text, one for each character."""
    texts = {book.vocabulary.bytes_of(token).decode(): token for token in range(8, 104)}
    return lambda text: [texts[character] for character in text]


def sampled(row: GuidedRow, book: GrammarBook, position: int = 10**6) -> set[int] | None:
    """What may be sampled next; None is all."""
    if not row.is_active(position):
        return None
    words = np.full(book.vocabulary.words, 0xABCDEF01, np.uint32)
    row.fill(words, position)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accept(row: GuidedRow, tokens: Sequence[int]) -> None:
    for token in tokens:
        row.accept(token)


def introduced(
    slot: int, guidance: Guidance | None, history: Int32Array, prompt_len: int
) -> NewRequest:
    parts = () if guidance is None else (guidance,)
    return NewRequest(slot, Sampling(), 99, history=history, prompt_len=prompt_len, parts=parts)


def test_a_grammar_is_needed_with_the_first_mask(tiny_book: Make) -> None:
    book = tiny_book()
    book.prepare([])
    processor = GuidanceProcessor(torch.device("cpu"), book)
    for slot, quick in enumerate((False, True)):
        guidance = Guidance(grammar=f'start: "a{slot}"', ends=ENDS, quick=quick)
        history = np.array([8, 9], np.int32)
        assert processor.add(slot, introduced(slot, guidance, history, 2))
        assert processor.is_active(slot, 2) and len(book) == 0
    assert list(book._begun) == ['start: "a1"']
    words = processor.masks(Rows([0, 1], [0, 1], [2, 2]), 128).allowed.words
    assert words.any(dim=1).all() and len(book) == 2 and not book._begun


def test_a_whole_answer(book: GrammarBook, ids: Make) -> None:
    row = GuidedRow(Guidance(grammar=ONE_WORD, ends=ENDS), book)
    assert END not in (sampled(row, book) or set())
    accept(row, ids("ab"))
    assert sampled(row, book) == {*ids("c")}
    accept(row, ids("c"))
    assert sampled(row, book) == {END} and row.phase is Phase.BOUND
    row.accept(END)
    assert row.phase is Phase.DONE and sampled(row, book) == {END}
    accept(row, ids("zz"))  # a step in flight: nothing is consumed
    assert sampled(row, book) == {END} and row.error is None


def test_ends_where_more_is_possible(book: GrammarBook, ids: Make) -> None:
    """With min_tokens until there, with ignore_eos for ever; unasked where nothing else is left."""
    digits = Guidance(grammar="start: /[0-9]{1,3}/", ends=(END, 1), ends_from=20)
    row = GuidedRow(digits, book, ids("1"))
    assert {END, 1} & (sampled(row, book, 19) or set()) == set()
    assert {END, 1} < (sampled(row, book, 20) or set())
    never = GuidedRow(replace(digits, ends_from=NO_END), book, ids("12"))
    assert sampled(never, book) == {*ids("0123456789")}
    never.accept(*ids("3"))
    assert sampled(never, book) == {END, 1}


def test_ends_are_those_of_the_request(book: GrammarBook, ids: Make) -> None:
    row = GuidedRow(Guidance(grammar=ONE_WORD, ends=(1,)), book, ids("abc"))
    assert sampled(row, book) == {1}
    none = GuidedRow(Guidance(grammar=ONE_WORD), book, ids("abc"))
    assert sampled(none, book) == set()


def test_an_end_that_the_grammar_names(book: GrammarBook, ids: Make) -> None:
    """As a call's closing mark that is an end of sequence as well."""
    guidance = Guidance(grammar=f'start: "a" <[{CALLED}]>', ends=(END, CALLED))
    row = GuidedRow(guidance, book, ids("a"))
    assert sampled(row, book) == {CALLED}


def test_forbidden(book: GrammarBook, ids: Make) -> None:
    row = GuidedRow(Guidance(forbidden=(CALL, 9), ends=ENDS), book)
    assert sampled(row, book) == set(range(116)) - {CALL, 9}
    row = GuidedRow(Guidance(grammar="start: /[a-c]+/", forbidden=tuple(ids("b"))), book)
    assert {*ids("ac")} <= (sampled(row, book) or set()) and not {*ids("b")} & sampled(row, book)


def test_calls(book: GrammarBook, ids: Make) -> None:
    calls = CallGrammar((CALL, NEVER), OF_A_CALL, max_calls=2)
    row = GuidedRow(Guidance(calls=calls, ends=ENDS), book)
    assert sampled(row, book) is None
    accept(row, [*ids("hi "), CALL])
    assert row.phase is Phase.BOUND and sampled(row, book) >= {*ids("{")}
    accept(row, ids("{a"))
    assert END not in sampled(row, book)
    accept(row, ids("}"))
    assert sampled(row, book) == {CALLED}
    row.accept(CALLED)
    assert row.phase is Phase.FREE and sampled(row, book) is None
    accept(row, [*ids("{"), NEVER, *ids("{}"), CALLED])
    assert sampled(row, book) == set(range(116)) - {CALL, NEVER}
    assert row.error is None


def test_an_end_in_free_text(book: GrammarBook) -> None:
    guidance = Guidance(calls=CallGrammar((CALL,), OF_A_CALL), ends=ENDS, ends_from=7)
    row = GuidedRow(guidance, book)
    assert sampled(row, book, 6) == set(range(116)) - {END} and sampled(row, book, 7) is None
    row.accept(END)
    assert sampled(row, book, 8) == {END}


# Thoughts. One mark is a special token, the other one is written in letters.

SPECIAL = Thinking(close="</think>", close_ids=(CLOSE,), starts_inside=True)


def spelled(ids: Make, **changes: Any) -> Thinking:
    return Thinking(close="[/t]", close_ids=tuple(ids("[/t]")), starts_inside=True, **changes)


def test_a_thought_before_a_grammar(book: GrammarBook, ids: Make) -> None:
    row = GuidedRow(Guidance(grammar=ONE_WORD, thinking=SPECIAL, ends=ENDS), book)
    assert row.phase is Phase.THINKING and sampled(row, book) == set(range(116)) - {END}
    accept(row, ids("</think>"))  # text that looks like the mark
    assert row.phase is Phase.THINKING
    row.accept(CLOSE)
    assert row.phase is Phase.BOUND
    accept(row, ids("abc"))
    assert sampled(row, book) == {END}


def test_a_thought_before_free_text(book: GrammarBook, ids: Make) -> None:
    row = GuidedRow(Guidance(calls=CallGrammar((CALL,), OF_A_CALL), thinking=SPECIAL), book)
    assert sampled(row, book) is None
    row.accept(CALL)  # a thought about calls is no call
    assert sampled(row, book) is None
    accept(row, [CLOSE, CALL])
    assert row.phase is Phase.BOUND


def test_a_close_in_letters(book: GrammarBook, ids: Make) -> None:
    row = GuidedRow(Guidance(grammar=ONE_WORD, thinking=spelled(ids), ends=ENDS), book)
    accept(row, ids("[/t [/[/t"))
    assert row.phase is Phase.THINKING
    accept(row, ids("]"))
    assert row.phase is Phase.BOUND


def test_no_token_carries_the_answer_past_the_close(book: GrammarBook, ids: Make) -> None:
    """``"}}"`` after "}": its second half would be text that no grammar has seen."""
    thinking = Thinking(close="a}", close_ids=tuple(ids("a}")), starts_inside=True)
    double = book.vocabulary.tokens.tokenize_str("}}")
    assert len(double) == 1
    row = GuidedRow(Guidance(grammar=ONE_WORD, thinking=thinking, ends=ENDS), book, ids("x"))
    assert double[0] in sampled(row, book)
    row.accept(*ids("a"))
    assert sampled(row, book) == set(range(116)) - {END, *double}


@pytest.mark.parametrize("budget", [0, 1, 3, 7])
def test_the_budget_is_exact(budget: int, book: GrammarBook, ids: Make) -> None:
    for thinking in (SPECIAL, spelled(ids)):
        for grammar in ("", ONE_WORD):
            guidance = Guidance(grammar=grammar, thinking=replace(thinking, budget=budget))
            row = GuidedRow(guidance, book)
            for _ in range(budget):
                assert grammar or sampled(row, book) is None
                row.accept(*ids("x"))
            for token in thinking.close_ids:
                assert row.phase is Phase.THINKING and sampled(row, book) == {token}
                row.accept(token)
            assert row.phase is (Phase.BOUND if grammar else Phase.FREE)


def test_a_close_that_has_begun_is_finished(book: GrammarBook, ids: Make) -> None:
    row = GuidedRow(Guidance(thinking=spelled(ids, budget=4)), book, ids("xx[/"))
    assert sampled(row, book) == {*ids("t")}
    accept(row, ids("t]"))
    assert row.phase is Phase.FREE and sampled(row, book) is None


def test_an_answer_may_open_a_thought(book: GrammarBook, ids: Make) -> None:
    thinking = Thinking("</think>", (CLOSE,), False, open_ids=(THINK,), budget=2)
    guidance = Guidance(grammar=ONE_WORD, thinking=thinking, ends=ENDS)
    row = GuidedRow(guidance, book)
    first = sampled(row, book)
    assert THINK in first and {*ids("at")} <= first and END not in first
    row.accept(THINK)
    assert row.phase is Phase.THINKING
    accept(row, ids("xy"))
    assert sampled(row, book) == {CLOSE}
    accept(row, [CLOSE, *ids("abc")])
    assert sampled(row, book) == {END}
    direct = GuidedRow(guidance, book, ids("a"))
    assert direct.phase is Phase.BOUND and sampled(direct, book) == {*ids("b")}
    free = GuidedRow(replace(guidance, grammar=""), book)
    assert sampled(free, book) is None
    accept(free, [*ids("a"), THINK])
    assert free.phase is Phase.FREE, "a thought comes first or not at all"


def test_a_mark_of_several_tokens_that_the_grammar_begins_with(
    book: GrammarBook, ids: Make
) -> None:
    thinking = Thinking("[/t]", tuple(ids("[/t]")), False, open_ids=tuple(ids("ax")))
    guidance = Guidance(grammar=ONE_WORD, thinking=thinking, ends=ENDS)
    row = GuidedRow(guidance, book, ids("a"))
    assert row.phase is Phase.OPENING and sampled(row, book) == {*ids("bx")}
    answer = GuidedRow(guidance, book, ids("ab"))
    assert answer.phase is Phase.BOUND and sampled(answer, book) == {*ids("c")}
    thought = GuidedRow(guidance, book, ids("ax"))
    assert thought.phase is Phase.THINKING
    other = replace(thinking, open_ids=tuple(ids("xa")))
    row = GuidedRow(replace(guidance, thinking=other), book, ids("x"))
    assert sampled(row, book) == {*ids("a")}, "the mark is no beginning of an answer"


def test_a_mark_in_other_tokens(book: GrammarBook, ids: Make) -> None:
    """``</`` is one token as well; the mark is known by its text, and the budget holds."""
    thinking = Thinking("[/t]", tuple(ids("[/t]")), False, open_ids=tuple(ids("</t")), budget=1)
    (both,) = book.vocabulary.tokens.tokenize_str("</")
    for opening in (ids("</t"), [both, *ids("t")]):
        row = GuidedRow(Guidance(thinking=thinking), book, opening)
        assert row.phase is Phase.THINKING
        row.accept(*ids("x"))
        assert sampled(row, book) == {*ids("[")}


def test_a_call_may_end_a_thought(book: GrammarBook, ids: Make) -> None:
    calls = CallGrammar((CALL,), OF_A_CALL)
    for ends in (True, False):
        thinking = replace(SPECIAL, budget=9, ends_at_call=ends)
        row = GuidedRow(Guidance(calls=calls, thinking=thinking), book, [*ids("ab"), CALL])
        assert row.phase is (Phase.BOUND if ends else Phase.THINKING)


def test_a_mark_of_a_call_begins_the_grammar_within_a_thought(book: GrammarBook, ids: Make) -> None:
    """If the grammar may begin with it; else it is not sampled, as no call has begun."""
    thinking = replace(SPECIAL, calls=(CALL, CALLED))
    guidance = Guidance(grammar=FORCED, thinking=thinking, ends=ENDS)
    row = GuidedRow(guidance, book, ids("ab"))
    assert sampled(row, book) == set(range(116)) - {END, CALLED}
    row.accept(CALL)
    assert row.phase is Phase.BOUND
    allowed = sampled(row, book)
    assert allowed is not None and {*ids("{")} <= allowed and not {*ids("a"), CALL} & allowed
    accept(row, [*ids("{a}"), CALLED])
    assert sampled(row, book) == {END}
    row = GuidedRow(replace(guidance, grammar=ONE_WORD), book, ids("ab"))
    assert sampled(row, book) == set(range(116)) - {END, CALL, CALLED}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("quoted", ["z", "{z1", "{ab", "}", "{a}z"])
def test_a_quoted_mark_is_text_until_a_call_names_a_function(
    within: bool, quoted: str, book: GrammarBook, ids: Make
) -> None:
    """In an answer, and in a thought that a call ends."""
    thinking = replace(SPECIAL, starts_inside=True, ends_at_call=True) if within else None
    phase = Phase.THINKING if within else Phase.FREE
    calls = CallGrammar((CALL,), OF_A_CALL, max_calls=1)
    row = GuidedRow(Guidance(calls=calls, thinking=thinking, ends=ENDS, names=("ab",)), book)
    for token in (CALL, *ids(quoted)):
        row.accept(token)
        assert row.phase is phase and sampled(row, book) is None
    accept(row, [CALL, *ids("{ab")])
    assert row.phase is phase and sampled(row, book) is None
    accept(row, ids("c"))
    assert row.phase is Phase.BOUND and sampled(row, book) == {*ids("}")}
    accept(row, [*ids("}"), CALLED])
    assert row.phase is Phase.FREE and CALL not in (sampled(row, book) or set())


# Failures.


@pytest.mark.parametrize("output", ["", "zz", "ab"])
def test_errors_stay(output: str, book: GrammarBook, ids: Make) -> None:
    """A grammar that does not compile, a token that it does not have; one that is exhausted."""
    text = "start: missing" if not output else ONE_WORD
    row = GuidedRow(Guidance(grammar=text, ends=ENDS), book, ids(output))
    if output == "ab":
        row.accept(*ids("a"))
    for _ in range(2):
        assert row.is_active(9)
        with pytest.raises(GrammarFailed):
            sampled(row, book)
        row.accept(*ids("a"))


def test_a_limit_is_met_amid_the_answer(
    tiny_book: Make, ids: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "max_lexer_states", 60)
    book = tiny_book()
    row = GuidedRow(Guidance(grammar="start: /.*a.{500}/", ends=ENDS), book)
    letters = random.Random(1).choices("ax", k=300)
    with pytest.raises(GrammarFailed, match="the grammar cannot go on|is not of the request's"):
        for letter in letters:
            sampled(row, book)
            row.accept(*ids(letter))


# A state is a function of the token log.

GUIDANCES = [
    Guidance(grammar=JSON, ends=ENDS),
    Guidance(grammar=JSON, ends=ENDS, ends_from=30, forbidden=(9,)),
    Guidance(calls=CallGrammar((CALL,), OF_A_CALL, max_calls=1), ends=ENDS),
    Guidance(calls=CallGrammar((CALL,), OF_A_CALL), ends=ENDS, names=("a",)),
    Guidance(grammar=JSON, thinking=replace(SPECIAL, budget=5), ends=ENDS),
    Guidance(
        grammar=JSON,
        thinking=Thinking("</think>", (13, 21, 90), True, budget=6),
        ends=ENDS,
    ),
    Guidance(grammar=FORCED, thinking=replace(SPECIAL, calls=(CALL, CALLED)), ends=ENDS),
    Guidance(
        calls=CallGrammar((CALL,), OF_A_CALL),
        thinking=Thinking("</think>", (CLOSE,), False, open_ids=(THINK, 20), budget=3),
        ends=ENDS,
    ),
]


@settings(max_examples=60)
@given(which=st.integers(0, len(GUIDANCES) - 1), seed=st.integers(0, 10**6), data=st.data())
def test_replay_and_rollback_give_the_state_of_the_run(
    which: int, seed: int, data: st.DataObject, book: GrammarBook
) -> None:
    """A random walk; then from each index anew, and back again."""
    guidance, numbers = GUIDANCES[which], random.Random(seed)
    row = GuidedRow(guidance, book)
    output: list[int] = []
    masks = [sampled(row, book, 10)]
    for _ in range(25):
        choices = sorted(masks[-1] if masks[-1] is not None else range(116))
        marks = [token for token in (CALL, CLOSE, THINK) if token in choices]
        lucky = marks and numbers.random() < 0.3
        output.append(numbers.choice(marks if lucky else choices))
        row.accept(output[-1])
        masks.append(sampled(row, book, 10 + len(output)))
        assert row.error is None
    for index in range(len(output) + 1):
        again = GuidedRow(guidance, book, output[:index])
        assert sampled(again, book, 10 + index) == masks[index]
        assert again.phase is row.phase or index < len(output)
    back = data.draw(st.integers(0, len(output)))
    row.rollback(back)
    for index in range(len(output) - back, len(output)):
        assert sampled(row, book, 10 + index) == masks[index]
        row.accept(output[index])
    assert sampled(row, book, 10 + len(output)) == masks[-1]


def test_words_hold_all_tokens(book: GrammarBook) -> None:
    assert book.vocabulary.words * WORD >= 128


def test_what_a_gpu_can_hold_a_row_to(tiny_book: Make) -> None:
    """Forbidden tokens and a minimum length; a grammar, calls and budgets need the host."""
    processor = GuidanceProcessor(torch.device("cpu"), tiny_book())
    history = np.zeros(3, np.int32)
    for guidance, wanted in [
        (Guidance(forbidden=(5, 9)), DeviceRules(banned=(5, 9))),
        (Guidance(ends=ENDS, ends_from=8), DeviceRules(banned_early=ENDS, banned_until=8)),
        (Guidance(grammar=ONE_WORD), None),
        (Guidance(calls=CallGrammar((CALL,), OF_A_CALL)), None),
        (Guidance(thinking=replace(SPECIAL, budget=3)), None),
    ]:
        assert processor.add(0, introduced(0, guidance, history, 3))
        assert processor.device_rules(0) == wanted
    for free in (None, Guidance(ends=ENDS), Guidance(thinking=SPECIAL)):
        assert not processor.add(1, introduced(1, free, history, 3))
