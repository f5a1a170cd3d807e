"""Every kind of decoder: however the tokens of a text are cut, it is the text of all of them."""

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from rayfin.actors.messages import EngineRequest, Sampling, StopRules, TokenDelta, TokenLogprob
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.logprobs import LogprobsWriter
from rayfin.deployments.text.output import OutputText
from rayfin.deployments.text.tokenizer import Tokenizer

HALF = "\ufffd"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁he", "llo", "你", ".", "▁▁", "é", "'s", HALF]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPLITS = 10_000

Decoder = Callable[[], object]
SPACES = decoders.Replace("▁", " ")
WITH_BYTES: dict[str, Decoder] = {
    "gemma": lambda: [SPACES, decoders.ByteFallback(), decoders.Fuse()],
    "llama": lambda: [
        SPACES,
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ],
    "spm": lambda: [decoders.ByteFallback(), decoders.Metaspace()],
    "bytes alone": lambda: [decoders.ByteFallback()],
}
OTHERS: dict[str, tuple[Decoder, list[str]]] = {
    "byte level": (
        lambda: [decoders.ByteLevel()],
        [*ALPHABET, "Ġhe", "llo", "ä½", "ðŁĺ", "Ģæ", "¼¢å"],
    ),
    "metaspace": (lambda: [decoders.Metaspace()], WORDS),
    "metaspace, never": (lambda: [decoders.Metaspace(prepend_scheme="never")], WORDS),
    "fused": (lambda: [SPACES, decoders.Fuse(), decoders.Strip(" ", 1, 0)], WORDS),
    "wordpiece": (lambda: [decoders.WordPiece()], ["he", "##llo", ".", "'", "s", "do", "not", "!"]),
    "wordpiece, raw": (lambda: [decoders.WordPiece("##", False)], ["he", "##llo", ".", "n't"]),
    "suffix": (lambda: [decoders.BPEDecoder("</w>")], ["he", "llo</w>", ".</w>", "a", "你</w>"]),
    "ctc": (lambda: [decoders.CTC("<pad>", "|")], ["<pad>", "|", "h", "e", "l", "o"]),
    "none": (lambda: [], ["he", "llo", ".", "你"]),
}
KINDS = [*WITH_BYTES, *OTHERS]


def make(kind: str) -> Tokenizer:
    """A tokenizer that has two special tokens and an added one."""
    if kind in WITH_BYTES:
        chain, pieces = WITH_BYTES[kind](), [*BYTES, "a", *WORDS]
    else:
        chain, pieces = OTHERS[kind][0](), OTHERS[kind][1]
    vocab = {text: number for number, text in enumerate(["<unk>", *dict.fromkeys(pieces)])}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>"))
    links = list(chain)  # type: ignore[call-overload]
    if links:
        backend.decoder = links[0] if len(links) == 1 else decoders.Sequence(links)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<call>", special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>"))


def cut(draw: random.Random, ids: Sequence[int]) -> list[list[int]]:
    """Random pushes, some of them empty."""
    places = sorted(draw.randint(0, len(ids)) for _ in range(draw.randint(0, len(ids))))
    return [list(ids[i:j]) for i, j in zip([0, *places], [*places, len(ids)], strict=True)]


def streamed(tokenizer: Tokenizer, pushes: list[list[int]], skip: bool) -> str:
    detokenizer = tokenizer.detokenizer((), skip)
    return "".join([*map(detokenizer.push, pushes), detokenizer.finish()])


def written(tokenizer: Tokenizer, text: str) -> list[int]:
    """The byte tokens of a text."""
    ids = [tokenizer.backend.token_to_id(BYTES[byte]) for byte in text.encode()]
    assert None not in ids
    return ids


def answers(tokenizer: Tokenizer, draw: random.Random) -> list[int]:
    """Random tokens; bytes in runs that are texts, or that begin none."""
    ids: list[int] = []
    for _ in range(draw.randint(1, 8)):
        if tokenizer.byte_of and draw.random() < 0.6:
            ids += written(tokenizer, "".join(draw.choices("😀漢字é\nA", k=draw.randint(1, 4))))
            ids.append(draw.randrange(257, tokenizer.vocab_size))
        elif tokenizer.byte_of and draw.random() < 0.3:
            run = draw.choice([b"\xff", b"\xf0\x9f", b"\x80\x80", b"\xe6\xbc", b"\xf0\x9f\x98"])
            ids += [1 + byte for byte in run]
            ids.append(draw.randrange(257, tokenizer.vocab_size - 3))
        else:
            low = 257 if tokenizer.byte_of else 0
            ids.append(draw.randrange(low, tokenizer.vocab_size))
    return ids


def expected(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """The text of all tokens. In a run of bytes, those that are no character are U+FFFD each."""
    shown = [t for t in ids if not (skip and t in tokenizer.special_token_ids)]
    instead: list[int] = []
    for is_byte, group in itertools.groupby(shown, tokenizer.byte_of.__contains__):
        if not is_byte:
            instead += group
            continue
        run = bytes(tokenizer.byte_of[token] for token in group)
        for character in run.decode(errors="surrogateescape"):
            half = 0xDC80 <= ord(character) <= 0xDCFF
            instead += written(tokenizer, HALF if half else character)
    return str(tokenizer.backend.decode(instead, skip_special_tokens=False))


@pytest.mark.parametrize("kind", KINDS)
def test_however_tokens_are_cut(kind: str) -> None:
    """Specials and added tokens between them, left out and shown."""
    tokenizer, draw = make(kind), random.Random(kind)
    for number in range(SPLITS // len(KINDS) + 1):
        ids, skip = answers(tokenizer, draw), number % 2 == 0
        whole = expected(tokenizer, ids, skip)
        pushes = cut(draw, ids)
        assert streamed(tokenizer, pushes, skip) == whole, (pushes, tokenizer.strings(ids))


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize("at", range(11))
def test_characters_of_bytes_cut_in_two(kind: str, at: int) -> None:
    """And each of them comes with its last byte."""
    tokenizer = make(kind)
    ids = written(tokenizer, "😀漢字")
    detokenizer = tokenizer.detokenizer()
    first, second = detokenizer.push(ids[:at]), detokenizer.push(ids[at:])
    assert first == ids_text(ids[:at], tokenizer) and first + second == "😀漢字"
    assert detokenizer.finish() == ""


def ids_text(ids: list[int], tokenizer: Tokenizer) -> str:
    return bytes(tokenizer.byte_of[token] for token in ids).decode(errors="ignore")


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize(
    ("run", "text"),
    [
        (b"\xf0\x9f", HALF * 2),
        (b"\xff\xff\xff", HALF * 3),
        ("漢".encode() + b"\xe5\xad", "漢" + HALF * 2),
        (b"\xe6\xbc" + "字".encode(), HALF * 2 + "字"),
        (b"\xe6\xbcA", HALF * 2 + "A"),
    ],
)
@pytest.mark.parametrize("end", [[], ["."], ["</s>", "."]])
def test_bytes_that_are_no_text(kind: str, run: bytes, text: str, end: list[str]) -> None:
    """A run without a character is what the decoder makes of it; one with some keeps them."""
    tokenizer, dot = make(kind), end[-1] if end else ""
    ids = [1 + byte for byte in run] + [tokenizer.backend.token_to_id(each) for each in end]
    for pushes in ([ids], [[token] for token in ids]):
        assert streamed(tokenizer, pushes, True) == text + dot
    if set(text) == {HALF}:
        assert tokenizer.decode(ids) == text + dot


@pytest.mark.parametrize("kind", ["gemma", "llama", "spm"])
@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_stop_strings_and_offsets_in_characters_of_bytes(kind: str, size: int) -> None:
    """A stop string ends an answer with the byte that completes it."""
    tokenizer = make(kind)
    ids = [tokenizer.backend.token_to_id("a"), *written(tokenizer, "😀漢字"), 257]
    request = EngineRequest("r", np.array([257], np.int32), Sampling(), StopRules(99))
    text = OutputText(tokenizer, SamplingParams(stop="漢字"), request)
    said, tokens, offsets = "", 0, list[int]()
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        entries = [TokenLogprob(-1.0, 1, ())] * len(part)
        last = "length" if start + size >= len(ids) else None
        delta = text.push(TokenDelta("r", part, last, logprobs=entries))
        said, tokens, offsets = (
            said + delta.text,
            tokens + len(delta.token_ids),
            offsets + delta.offsets,
        )
        if text.finished:
            break
    assert (said, tokens, delta.stop_reason) == ("a😀", 11, "漢字")
    assert offsets == [0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_an_echoed_prompt_of_bytes() -> None:
    tokenizer = make("gemma")
    ids = written(tokenizer, "é漢") + [tokenizer.backend.token_to_id(".")]
    entries = LogprobsWriter(tokenizer, 0).echo(ids, {}, "é漢.")
    assert entries.text_offset == [0, 0, 1, 1, 1, 2]
    cut = LogprobsWriter(tokenizer, 0).echo(ids[:-2], {}, "é" + HALF * 2)
    assert cut.text_offset == [0, 0, 1, 1]
