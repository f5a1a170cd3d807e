"""The book of compiled grammars: what it keeps, what it refuses, and its threads."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rayfin.actors.errors import GrammarFailed, InvalidConfig
from rayfin.actors.runner.parts.grammars import book as module
from rayfin.actors.runner.parts.grammars.book import GrammarBook, words_of
from rayfin.actors.runner.parts.grammars.compile_threads import IdleCompiler

Make = Callable[..., Any]


def grammar(word: str) -> str:
    return f'start: "{word}"'


def test_a_matcher_is_a_copy(tiny_book: Make) -> None:
    book = tiny_book()
    tokens = book.vocabulary.tokens.tokenize_str("abc")
    first, second = book.matcher(grammar("abc")), book.matcher(grammar("abc"))
    assert first.consume_tokens(tokens) and first.is_stopped()
    assert not second.is_stopped() and second.consume_tokens(tokens)


def test_the_least_recently_used_go_and_held_ones_stay(tiny_book: Make) -> None:
    book = tiny_book(idle=2)
    held = (grammar("a"), grammar("a"))  # twice in one request
    book.hold(held)
    book.hold(held[:1])
    for word in "abcd":
        book.prepare([grammar(word)])
    book.matcher(grammar("c"))
    book.prepare([grammar("e")])
    kept = {word for word in "abcde" if grammar(word) in book}
    assert kept == {"a", "c", "e"} and len(book) == 3
    book.release(held)
    assert grammar("a") in book
    book.release(held[:1])
    assert {word for word in "abcde" if grammar(word) in book} == {"c", "e"}


def test_counts(tiny_book: Make) -> None:
    book = tiny_book()
    assert book.take_counts() == ((), 0, 0)
    book.prepare([grammar("a")])
    book.hold([grammar("a")])
    book.hold([grammar("b")])
    book.matcher(grammar("b"))
    seconds, hits, misses = book.take_counts()
    assert len(seconds) == 2 and min(seconds) > 0 and (hits, misses) == (1, 1)
    assert book.take_counts() == ((), 0, 0)


def test_a_step_that_waits_has_the_grammar_at_once(
    tiny_book: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside: list[object] = []

    def compile(own: IdleCompiler[Any], work: Callable[[], Any]) -> Any:
        beside.append(own)
        return work()

    monkeypatch.setattr(IdleCompiler, "compile", compile)
    book = tiny_book()
    book.prepare([grammar("a")], at_once=True)
    assert grammar("a") in book and not beside
    book.prepare([grammar("b")])
    assert len(beside) == 1


def test_one_that_was_begun_compiles_beside_its_caller(
    tiny_book: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, threads = threading.Event(), []
    compiled = module.compiled

    def wait(*given: Any) -> Any:
        threads.append(threading.current_thread())
        assert go.wait(30)
        return compiled(*given)

    monkeypatch.setattr(module, "compiled", wait)
    book = tiny_book()
    texts = (grammar("a"), grammar("b"))
    book.hold(texts)
    book.begin(texts)  # there is no vocabulary yet
    book.prepare([])
    assert not threads
    book.begin(texts)  # the caller goes on
    book.begin(texts)
    assert len(book) == 0
    book.release(texts[1:])  # its request has left
    go.set()
    tokens = book.vocabulary.tokens.tokenize_str("a")
    for _ in range(2):
        assert book.matcher(texts[0]).consume_tokens(tokens)
    assert len(threads) == 1 and threading.current_thread() not in threads
    book.begin(texts[:1])
    assert len(threads) == 1 and len(book) == 1
    (seconds,), hits, misses = book.take_counts()
    assert seconds > 0 and (hits, misses) == (0, 2)


def test_one_that_was_begun_and_fails(tiny_book: Make) -> None:
    book = tiny_book()
    book.prepare([])
    book.hold(["start: missing"])
    book.begin(["start: missing"])
    with pytest.raises(GrammarFailed, match="the grammar cannot be "):
        book.matcher("start: missing")


@pytest.mark.parametrize(
    "text",
    [
        "start: missing",
        "start: /[/",
        '{"grammars": [{"json_schema": {"$ref": "#"}}]}',  # fails at its first mask
        "start: " + "(" * 30_000 + '"a"' + ")" * 30_000,
        "",
    ],
)
def test_what_does_not_compile_says_why(text: str, tiny_book: Make) -> None:
    book = tiny_book()
    for call in (book.prepare, book.prepare, lambda texts: book.matcher(texts[0])):
        with pytest.raises(GrammarFailed, match="the grammar cannot be ") as caught:
            call([text])
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    book.prepare([grammar("a")])


def test_a_tokenizer_that_cannot_be_loaded() -> None:
    def load() -> Any:
        raise InvalidConfig("Cannot load a tokenizer")

    book = GrammarBook(load)
    for call in (lambda: book.prepare([]), lambda: book.matcher(grammar("a"))):
        with pytest.raises(GrammarFailed, match="Cannot load a tokenizer"):
            call()


def test_threads(tiny_book: Make) -> None:
    """All at once: one vocabulary, and what each asks for."""
    book = tiny_book(idle=3)
    stopped: list[bool] = []

    def use(number: int) -> None:
        for turn in range(20):
            text = f"start: /[a-c]{{{(number * turn) % 7 + 1}}}/"
            book.prepare([text])
            matcher = book.matcher(text)
            size = (number * turn) % 7 + 1
            stopped.append(matcher.consume_tokens(book.vocabulary.tokens.tokenize_str("a" * size)))

    threads = [threading.Thread(target=use, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stopped == [True] * 80 and len(book) <= 4


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_tokens_beyond_a_text(kind: str, tiny_book: Make) -> None:
    vocabulary = tiny_book(kind).vocabulary
    texts = [vocabulary.bytes_of(token) for token in range(8, 116)]
    for text in ("t", "<", '"', "a", "}", "</think>"):
        beyond = vocabulary.beyond(text)
        expected = [
            token + 8
            for token, own in enumerate(texts)
            if own.startswith(text.encode()) and own[len(text) :].strip()
        ]
        assert np.array_equal(beyond, words_of(expected, vocabulary.words)), text


def test_padding_is_not_known(tiny_book: Make) -> None:
    vocabulary = tiny_book(size=128).vocabulary
    assert np.array_equal(vocabulary.all, words_of(range(116), 4)) and not vocabulary.trimmed
    smaller = tiny_book(size=100).vocabulary
    assert np.array_equal(smaller.all, words_of(range(100), 4)) and smaller.trimmed
