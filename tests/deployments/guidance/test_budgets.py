"""A thought that its budget ends: by a runner's row and its parser, and no mark is content."""

from dataclasses import replace

import numpy as np
import pytest

from call_walks import Walker, byte_tokenizer, tokens_of
from rayfin.actors.guidance import Guidance
from rayfin.actors.runner.parts.grammars.guided_row import GuidedRow
from rayfin.deployments.guidance.calls import CallRules, build_guidance
from rayfin.deployments.guidance.thinking import make_thinking
from rayfin.deployments.text.parsing.events import Piece
from rayfin.deployments.text.parsing.format import ReasoningFormat, thought_start
from rayfin.deployments.text.parsing.formats import REASONING_FORMATS
from rayfin.deployments.text.parsing.parser import OutputParser

FINAL = "<|start|>assistant<|channel|>final<|message|>"


def written(walker: Walker, guidance: Guidance, wished: list[int]) -> list[int]:
    """What a model writes that goes on with its own text behind each token that it must write."""
    row = GuidedRow(replace(guidance, ends=(walker.end,)), walker.book)
    tokens, rest = list[int](), [*wished, walker.end]
    while rest:
        words = np.full(walker.book.vocabulary.words, 0xFFFFFFFF, np.uint32)
        if row.is_active(len(tokens)):
            row.fill(words, len(tokens))
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        tokens.append(rest.pop(0) if rest[0] in allowed else int(allowed[0]))
        row.accept(tokens[-1])
        assert row.error is None
    return tokens[:-1]


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 3])
@pytest.mark.parametrize("row", REASONING_FORMATS.values(), ids=lambda row: row.name)
def test_no_mark_is_content(
    row: ReasoningFormat, budget: int, inside: bool, has_tokens: bool
) -> None:
    """The model does not know that its thought has ended, and ends it once more."""
    if row.channels and not has_tokens:
        pytest.skip("these marks are always tokens")
    walker = Walker(byte_tokenizer(tokens_of(row) if has_tokens else []))
    opening = row.open[0] if inside else ""
    thinking = make_thinking(row, opening, walker.tokenizer, budget=budget)
    guidance = build_guidance(calls=CallRules(), thinking=thinking)
    assert guidance is not None
    text = f"ZYXWVJQ{row.close[0]}{FINAL if row.channels else ''}Paris."
    encode = walker.tokenizer.encode
    wished = encode(text if inside else row.open[0] + text, add_special_tokens=False)
    tokens = written(walker, guidance, wished)
    for stream in (True, False):
        special = {mark for mark in tokens_of(row) if mark in walker.tokenizer.added_ids}
        parser = OutputParser(
            None,
            row,
            functions={},
            special=special,
            starts_inside=thought_start(row, opening),
            cut_thoughts=True,
        )
        marks = {walker.tokenizer.added_ids[mark]: mark for mark in special}
        detokenizer = walker.tokenizer.detokenizer((), skip_special_tokens=False)
        pieces: list[Piece] = []
        for token in tokens:
            if token in marks:
                pieces += [Piece(detokenizer.split(token)), Piece(marker=marks[token])]
            else:
                pieces.append(Piece(detokenizer.push([token])))
        batches = [[piece] for piece in pieces] if stream else [pieces]
        events = [event for batch in batches for event in parser.push(batch)]
        events += parser.finish("stop")
        reasoning, content = (
            "".join(event.text for event in events if event.kind == kind)
            for kind in ("reasoning", "content")
        )
        assert reasoning == "ZYXWVJQ"[:budget]
        assert content == "ZYXWVJQ"[budget:] + "Paris."
