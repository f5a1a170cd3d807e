"""Custom tools: their grammar holds the text that calls of each format have, whatever its marks."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from call_walks import Walker, byte_tokenizer, tokens_of
from patches import TOOL, parse_patch
from rayfin.deployments.guidance.calls import CallRules, build_guidance, make_call_rules
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.guidance.tools import declared_tools, flat_tools
from rayfin.deployments.text.parsing.events import Event, Piece
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.parsing.formats import TOOL_FORMATS
from rayfin.deployments.text.parsing.render import WrittenCall, render_calls
from rayfin.deployments.text.parsing.text_calls import TextCallParser
from rayfin.deployments.text.tokenizer import Tokenizer
from tiers import few

PATCH = "*** Begin Patch\n*** Add File: é.py\n+print(\"a\\n\", 'b')\t\n*** End Patch\n"
(PATCHER,) = declared_tools([TOOL], flat_tools).functions
ROWS = [pytest.param(row, id=name) for name, row in TOOL_FORMATS.items()]


class PatchWalker(Walker):
    """Samples patches: lines end soon, and so do patches."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        ids = {tokenizer.encode(char, False)[0]: char for char in "\\\nn*"}
        self._ending = ids.keys()

    def _pick(self, rng: random.Random, allowed: set[int]) -> int:
        ending = allowed & self._ending
        return rng.choice(sorted(ending if ending and rng.random() < 0.3 else allowed))


def rules_of(walker: Walker, row: ToolFormat, choice: ToolChoice) -> CallRules:
    return make_call_rules(row, [PATCHER], choice, walker.tokenizer)


def walker_of(row: ToolFormat, has_tokens: bool = True) -> Walker:
    return Walker(byte_tokenizer(tokens_of(row) if has_tokens else []))


def text_of(walker: Walker, row: ToolFormat, tokens: list[int]) -> str:
    """The text of the one call that the parser reads, token by token."""
    special = {text for text in tokens_of(row) if text in walker.tokenizer.added_ids}
    parser = TextCallParser(
        {PATCHER.name},
        row,
        None,
        functions={PATCHER.name: PATCHER.parameters},
        forced=PATCHER.name,
        special=special,
    )
    marks = {walker.tokenizer.added_ids[mark]: mark for mark in special}
    detokenizer = walker.tokenizer.detokenizer((), skip_special_tokens=False)
    events: list[Event] = []
    for token in tokens:
        if token in marks:
            events += parser.push([Piece(detokenizer.split(token)), Piece(marker=marks[token])])
        else:
            events += parser.push([Piece(detokenizer.push([token]))])
    events += [*parser.push([Piece(detokenizer.finish())]), *parser.finish("stop")]
    kinds = [event.kind for event in events if event.kind in ("call", "call_end")]
    assert kinds == ["call", "call_end"], events
    return "".join(event.text for event in events if event.kind == "arguments")


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("row", ROWS)
def test_a_call_is_held_to_the_grammar_and_read_as_its_text(
    row: ToolFormat, has_tokens: bool
) -> None:
    walker = walker_of(row, has_tokens)
    for choice in (ToolChoice(), ToolChoice("required", PATCHER.name)):
        rules = rules_of(walker, row, choice)
        assert rules.unenforced == ()
        guidance = build_guidance(grammar=rules.grammar, calls=rules)
        assert guidance is not None
        for patch in (PATCH, PATCH.replace("+print", "print"), PATCH + "x"):
            text = render_calls(row, [WrittenCall(PATCHER.name, {"input": patch})])
            tokens = walker.tokenizer.encode(text, add_special_tokens=False)
            taken = walker.phases(guidance, tokens) is not None
            assert taken == (patch == PATCH), (choice, patch, rules)
    tokens = walker.tokenizer.encode(
        render_calls(row, [WrittenCall(PATCHER.name, {"input": PATCH})]), add_special_tokens=False
    )
    assert text_of(walker, row, tokens) == PATCH


@pytest.mark.slow(reason="samples hundreds of patches")
@pytest.mark.parametrize("row", few([TOOL_FORMATS["hermes"], *TOOL_FORMATS.values()], 6))
def test_every_sampled_patch_parses(row: ToolFormat, depth: Callable[[int], int]) -> None:
    """Codex's own grammar; of hermes, the format of most models, a thousand."""
    walker = PatchWalker(byte_tokenizer(tokens_of(row)))
    grammar = rules_of(walker, row, ToolChoice("required", PATCHER.name)).grammar
    whole = 0
    for seed in range(depth(1000 if row.name == "hermes" else 40)):
        tokens = walker.walk(grammar, seed, longest=20_000)
        if tokens is not None:
            whole += 1
            assert parse_patch(text_of(walker, row, tokens))
    assert whole == depth(1000 if row.name == "hermes" else 40)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 99])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"input": PATCH}, PATCH),
        ({"input": 'a "quoted" \\ {"b"} 😀\u2028'}, 'a "quoted" \\ {"b"} 😀\u2028'),
        ({"input": "\ud83d!"}, "\ufffd!"),
        ({"input": ""}, ""),
        ({"patch": "x"}, '{"patch": "x"}'),
        ({"input": 1}, '{"input": 1}'),
        ({}, "{}"),
    ],
)
def test_texts_come_piece_by_piece(arguments: dict[str, Any], text: str, size: int) -> None:
    """A call that holds anything but one text is shown as it is."""
    for ascii_only in (True, False):
        written = json.dumps(arguments, ensure_ascii=ascii_only or "\ud83d" in str(arguments))
        said = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
        parser = TextCallParser({"f"}, TOOL_FORMATS["hermes"], None, functions={"f": {}})
        events = [
            event
            for i in range(0, len(said), size)
            for event in parser.push([Piece(said[i : i + size])])
        ]
        events += parser.finish("stop")
        assert "".join(event.text for event in events if event.kind == "arguments") == text
        assert [event.kind for event in events if event.kind != "arguments"] == ["call", "call_end"]
