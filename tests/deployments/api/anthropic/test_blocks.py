"""The blocks of a message: their events pair, and the whole is what the events add up to."""

import itertools
import json
from typing import Any

from anthropic.lib.streaming._messages import accumulate_event
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.deployments.api.anthropic.blocks import ReplyBlocks
from rayfin.deployments.api.anthropic.replies import (
    AnthropicMessage,
    AnthropicUsage,
    BlockStop,
    MessageStart,
)
from rayfin.deployments.text.parsing.events import Event

CALL_IDS = [f"call_{i}" for i in range(64)]


def call(index: int, *pieces: str, ended: bool = True) -> list[Event]:
    events = [Event("call", index=index, name=f"f{index}")]
    events += [Event("arguments", piece, index) for piece in pieces]
    return events + [Event("call_end", index=index)] * ended


def all_events(blocks: ReplyBlocks, *deltas: list[Event]) -> list[dict[str, Any]]:
    written = [event for delta in deltas for event in blocks.push(delta, CALL_IDS)]
    return [event.model_dump() for event in [*written, *blocks.stop()]]


def accumulated(events: list[dict[str, Any]]) -> Any:
    """What Anthropic's own client makes of them."""
    usage = AnthropicUsage(input_tokens=1, cache_read_input_tokens=0, output_tokens=0)
    empty = AnthropicMessage(id="msg_1", model="tiny", content=[], usage=usage)
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in [MessageStart(message=empty).model_dump(), *events]:
        snapshot = accumulate_event(
            event=event,  # type: ignore[arg-type]
            current_snapshot=snapshot,
            json_bufs=buffers,
        )
    return snapshot.content


@st.composite
def answers(draw: st.DrawFn) -> list[list[Event]]:
    """The events of an answer as a parser gives them, in deltas."""
    events: list[Event] = []
    calls = itertools.count()
    text = st.text("ab ", max_size=3)
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=6)):
        if kind == "call":
            given = json.dumps(draw(st.dictionaries(text, text, max_size=2)))
            cut = draw(st.integers(0, len(given)))
            events += call(next(calls), given[:cut], given[cut:])
        else:
            said = draw(st.lists(text, max_size=3))
            events += [Event(kind, piece) for piece in said]  # type: ignore[arg-type]
    events = events[: draw(st.integers(0, len(events)))]  # cut anywhere
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=4)))
    return [events[a:b] for a, b in itertools.pairwise([0, *cuts, len(events)])]


def test_all_kinds() -> None:
    blocks = ReplyBlocks()
    events = all_events(
        blocks,
        [Event("reasoning", "hm"), Event("reasoning", ".")],
        [Event("content", "look"), *call(0, '{"a"', ": 1}"), *call(1, "{}")],
    )
    kinds = [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]
    assert kinds == [
        *(("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0)),
        *(("start", 1), ("delta", 1), ("stop", 1)),
        *(("start", 2), ("delta", 2), ("delta", 2), ("stop", 2)),
        *(("start", 3), ("delta", 3), ("stop", 3)),
    ]
    deltas = [event["delta"]["type"] for event in events if "delta" in event]
    assert deltas == [
        *("thinking_delta", "thinking_delta", "signature_delta", "text_delta"),
        *("input_json_delta", "input_json_delta", "input_json_delta"),
    ]
    assert events[8]["content_block"] == {
        "type": "tool_use",
        "id": "call_0",
        "name": "f0",
        "input": {},
    }
    thinking, text, first, second = (block.model_dump() for block in blocks.content())
    assert thinking["thinking"] == "hm." and len(thinking["signature"]) == 44
    assert text == {"type": "text", "text": "look"}
    assert (first["id"], first["input"], second["input"]) == ("call_0", {"a": 1}, {})


def test_a_call_is_stopped_when_it_ends() -> None:
    blocks = ReplyBlocks()
    assert not isinstance(blocks.push(call(0, "{}", ended=False), CALL_IDS)[-1], BlockStop)
    assert isinstance(blocks.push([Event("call_end")], CALL_IDS)[-1], BlockStop)
    assert blocks.stop() == []


def test_a_call_that_is_cut_is_streamed_but_not_in_the_whole() -> None:
    blocks = ReplyBlocks()
    events = all_events(blocks, [*call(0, "{}"), *call(1, '{"a"', ended=False)])
    assert events[-1]["type"] == "content_block_stop"
    assert [block.type for block in blocks.content()] == ["tool_use"]
    assert "".join(e["delta"]["partial_json"] for e in events if "delta" in e) == '{}{"a"'


def test_a_call_that_broke_off_is_streamed_but_not_in_the_whole() -> None:
    blocks = ReplyBlocks()
    events = all_events(blocks, [*call(0, "{", ended=False), Event("content", "look")])
    assert [event["type"] for event in events].count("content_block_stop") == 2
    assert [block.type for block in blocks.content()] == ["text"]


def test_thinking_may_be_left_out() -> None:
    blocks = ReplyBlocks(shows_thinking=False)
    all_events(blocks, [Event("reasoning", "hm"), Event("content", "look")])
    assert [block.type for block in blocks.content()] == ["text"]


def test_an_empty_answer_has_no_block() -> None:
    blocks = ReplyBlocks()
    assert all_events(blocks, [Event("content", "")]) == [] == blocks.content()


@settings(max_examples=100)
@given(answers())
def test_any_answer(deltas: list[list[Event]]) -> None:
    """Every block starts, has deltas and stops before the next; a client sees the whole."""
    blocks = ReplyBlocks()
    events = all_events(blocks, *deltas)
    inside, last = False, -1
    for event in events:
        if event["type"] == "content_block_start":
            assert not inside and event["index"] == last + 1
            inside, last = True, event["index"]
        else:
            assert inside and event["index"] == last
            inside = event["type"] != "content_block_stop"
    assert not inside
    seen = accumulated(events)
    whole = [block.model_dump() for block in blocks.content()]
    kept = [block.to_dict() for block in seen][: len(whole)]
    assert len(seen) - len(whole) in (0, 1)  # a call that was cut is the last one
    assert kept == whole
    for block in whole:
        assert block["type"] == "tool_use" or block[block["type"]]
    for kind, name in (("content", "text"), ("reasoning", "thinking")):
        said = "".join(event.text for delta in deltas for event in delta if event.kind == kind)
        assert said == "".join(block[name] for block in whole if block["type"] == name)
