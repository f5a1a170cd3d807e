"""Pieces join to the text of all ids, and no piece ends inside a character."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.deployments.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow(reason="many random texts")

KINDS = ["byte_level", "byte_fallback", "metaspace"]
HALF = "\ufffd"
EXAMPLES = settings(max_examples=150)


@pytest.fixture(params=KINDS, scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def streamed(tokenizer: Tokenizer, prompt: list[int], chunks: list[list[int]], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer(prompt, skip_special_tokens=skip)
    return "".join([*map(detokenizer.push, chunks), detokenizer.finish()])


@EXAMPLES
@given(data=st.data(), skip=st.booleans())
def test_any_ids_of_a_byte_level_tokenizer(
    byte_level: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = st.lists(st.integers(0, byte_level.vocab_size + 5), max_size=12)
    chunks = data.draw(st.lists(ids, max_size=12))
    flat = [token for chunk in chunks for token in chunk]
    assert streamed(byte_level, [], chunks, skip) == byte_level.decode(flat, skip)


@EXAMPLES
@given(text=st.text(max_size=40), cut=st.integers(0, 40), skip=st.booleans())
def test_any_text_of_any_kind(tokenizer: Tokenizer, text: str, cut: int, skip: bool) -> None:
    ids = tokenizer.encode(text)
    prompt, rest = ids[:cut], ids[cut:]
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(ids, skip)
    if whole.startswith(before):  # else the cut is inside a character
        assert (
            streamed(tokenizer, prompt, [[token] for token in rest], skip) == whole[len(before) :]
        )


@EXAMPLES
@given(ids=st.lists(st.integers(0, 255), max_size=30), size=st.integers(1, 6))
def test_bytes_that_are_no_text_never_raise(
    byte_fallback: Tokenizer, ids: list[int], size: int
) -> None:
    tokens = [token + 3 for token in ids]
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    assert len(streamed(byte_fallback, [], chunks, True)) <= len(ids)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("text", ["👩‍👩‍👧 fünf", "مرحبا بالعالم", "你好吗"])
def test_no_piece_holds_half_a_character(
    request: pytest.FixtureRequest, kind: str, text: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push([token]) for token in tokenizer.encode(text)]
    assert HALF not in "".join(pieces)
    assert "".join(pieces) == text


def test_a_replacement_character_that_was_meant_is_kept(byte_level: Tokenizer) -> None:
    assert streamed(byte_level, [], [[t] for t in byte_level.encode("a�b")], True) == "a�b"


def test_an_unfinished_character_comes_at_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a😀")[:-1]
    detokenizer = byte_level.detokenizer()
    assert detokenizer.push(ids) == "a"
    assert detokenizer.finish() == HALF
    assert detokenizer.finish() == ""


def test_the_first_word_keeps_its_space(metaspace: Tokenizer) -> None:
    prompt, ids = metaspace.encode("hello"), metaspace.encode("world")
    assert metaspace.decode(ids) == "world"
    assert metaspace.detokenizer(prompt).push(ids) == " world"
    assert metaspace.detokenizer().push(ids) == "world"


def test_a_prompt_of_special_tokens_only_is_the_start_of_the_text(metaspace: Tokenizer) -> None:
    end = metaspace.encode("</s>", False)[-1:]
    assert metaspace.detokenizer(end * 100).push(metaspace.encode("world")) == "world"


def test_neighbouring_added_tokens_without_a_space(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|><|im_end|>b")
    assert byte_level.decode(ids, False, False) == "a<|im_end|><|im_end|>b"


def test_ten_thousand_invalid_bytes_take_linear_time(byte_level: Tokenizer) -> None:
    invalid = byte_level.backend.token_to_id("ÿ")  # the byte 0xFF
    detokenizer = byte_level.detokenizer()
    started = time.thread_time()
    text = "".join(detokenizer.push([invalid]) for _ in range(10_000)) + detokenizer.finish()
    assert text == HALF * 10_000
    assert time.thread_time() - started < 5
