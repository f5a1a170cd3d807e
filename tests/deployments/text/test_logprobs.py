"""Texts and bytes of single tokens, and their log probabilities."""

from rayfin.actors.messages import TokenLogprob
from rayfin.deployments.text.logprobs import Logprob, by_token, of_prompt
from rayfin.deployments.text.tokenizer import Tokenizer

SAYS = "hello world — 你好 👩‍👩‍👧 ok"


def test_the_bytes_of_tokens_join_to_the_text(
    byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(SAYS, False)
        joined = b"".join(map(tokenizer.token_bytes, ids))
        assert joined.decode().strip() == SAYS


def test_words_keep_their_space(metaspace: Tokenizer, byte_level: Tokenizer) -> None:
    for tokenizer in (metaspace, byte_level):
        texts = [tokenizer.token_text(token) for token in tokenizer.encode("hello world", False)]
        assert "".join(texts).strip() == "hello world" and any(" w" in text for text in texts)


def test_half_a_character_is_its_bytes(byte_level: Tokenizer) -> None:
    (first, _) = byte_level.encode("Ж", False)
    assert byte_level.token_text(first) == "\ufffd" and byte_level.token_bytes(first) == b"\xd0"


def test_the_tokens_own_comes_first_and_the_rest_is_cut() -> None:
    entry = TokenLogprob(-3.0, 9, ((5, -0.5), (6, -1.0), (7, -2.0)))
    assert by_token(8, entry, 2, None) == {
        8: Logprob(-3.0, 9),
        5: Logprob(-0.5, 1),
        6: Logprob(-1.0, 2),
    }
    assert list(by_token(8, entry, 2, None)) == [8, 5, 6]
    assert by_token(8, entry, 0, None) == {8: Logprob(-3.0, 9)}
    assert list(by_token(6, entry, 2, None)) == [6, 5]


def test_a_prompts_first_token_has_none(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("hello", False)
    entry = {i: TokenLogprob(-float(i), i) for i in range(1, len(ids))}
    listed = of_prompt(ids, entry, 0, byte_level)
    assert listed[0] is None and len(listed) == len(ids)
    for i, own in enumerate(listed[1:], start=1):
        assert own == {ids[i]: Logprob(-float(i), i, byte_level.token_text(ids[i]))}
