"""The output of a response: its items, their events, and copies that follow it."""

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.deployments.api.responses.events import events_from
from rayfin.deployments.api.responses.replies import FunctionCallItem, Response, Status
from rayfin.deployments.api.responses.state import ResponseState
from rayfin.deployments.text.parsing.events import Event

WANTED: dict[str, Any] = {
    "created_at": 0,
    "status": "in_progress",
    "model": "tiny",
    "background": False,
    "store": True,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "metadata": {},
}
ABSENT = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
CALL_IDS = [f"call_{i}" for i in range(64)]
ENDS: tuple[Status, ...] = ("completed", "incomplete", "cancelled", "failed")
THOUGHT, TEXT = Event("reasoning", "hm"), Event("content", "look")


def state_of(*, background: bool = False) -> ResponseState:
    wanted = {**WANTED, "background": background}
    if background:
        wanted["status"] = "queued"
    created = Response(id="resp_1", **wanted, **dict.fromkeys(ABSENT))
    return ResponseState(created, "", [], [], 3)


def call(index: int, *pieces: str, ended: bool = True) -> list[Event]:
    events = [Event("call", index=index, name=f"f{index}")]
    events += [Event("arguments", piece, index) for piece in pieces]
    return events + [Event("call_end", index=index)] * ended


def add(state: ResponseState, events: Sequence[Event], tokens: int = 1) -> None:
    state.append(events, tokens, 0, reasoning_tokens=1, call_ids=CALL_IDS)


def types(state: ResponseState) -> list[str]:
    return [event.type.removeprefix("response.") for event in events_from(state, 0)]


@st.composite
def answers(draw: st.DrawFn) -> list[list[Event]]:
    """The events of an answer as a parser gives them, in deltas."""
    events: list[Event] = []
    calls = itertools.count()
    text = st.text("ab ", max_size=3)
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=6)):
        if kind == "call":
            pieces = draw(st.lists(text, max_size=3))
            events += call(next(calls), *pieces, ended=draw(st.booleans()))
        else:
            said = draw(st.lists(text, max_size=3))
            events += [Event(kind, piece) for piece in said]  # type: ignore[arg-type]
    events = events[: draw(st.integers(0, len(events)))]  # cut anywhere
    cuts = sorted(draw(st.lists(st.integers(0, len(events)), max_size=4)))
    return [events[a:b] for a, b in itertools.pairwise([0, *cuts, len(events)])]


def test_the_order_of_all_kinds() -> None:
    state = state_of()
    add(state, [THOUGHT, Event("reasoning", ".")])
    add(state, [TEXT, *call(0, '{"a"', ": 1}"), *call(1, "{}")])
    state.finish("completed")
    assert types(state) == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    thought, message, first, second = state.response().output
    assert thought.content[0].text == "hm." and message.content[0].text == "look"
    assert isinstance(first, FunctionCallItem) and isinstance(second, FunctionCallItem)
    assert (first.call_id, first.name, first.arguments) == ("call_0", "f0", '{"a": 1}')
    assert (second.call_id, second.arguments, second.status) == ("call_1", "{}", "completed")
    prefixes = [item.id.split("_")[0] for item in state.response().output]
    assert prefixes == ["rs", "msg", "fc", "fc"]


def test_a_call_is_done_when_it_ends() -> None:
    """A client may run it while the answer goes on."""
    state = state_of()
    add(state, call(0, "{}", ended=False))
    assert types(state)[-1] == "function_call_arguments.delta"
    add(state, [Event("call_end")])
    assert types(state)[-1] == "output_item.done"
    assert state.response().output[0].status == "completed"
    assert state.response().status == "in_progress"


@pytest.mark.parametrize("pieces", [(), ('{"a"',)])
def test_a_call_that_is_cut_is_incomplete_and_not_continued(pieces: tuple[str, ...]) -> None:
    state = state_of()
    add(state, [TEXT, *call(0, "{}"), *call(1, *pieces, ended=False)])
    state.finish("incomplete")
    said = state.response().output
    assert [item.status for item in said] == ["completed", "completed", "incomplete"]
    assert types(state)[-4:] == [
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "incomplete",
    ]
    kept = state.conversation()
    assert [item.id for item in kept] == [item.id for item in said[:2]]


def test_a_call_that_broke_off_is_incomplete() -> None:
    """It has no end; what follows closes it."""
    state = state_of()
    add(state, [*call(0, "{", ended=False), TEXT, *call(1, "{}")])
    assert [item.status for item in state.response().output][:1] == ["incomplete"]
    state.finish("completed")
    said = state.response().output
    assert [item.status for item in said] == ["incomplete", "completed", "completed"]
    assert [item.id for item in state.conversation()] == [item.id for item in said[1:]]


def test_text_without_a_start_is_one_empty_message() -> None:
    state = state_of()
    add(state, [])
    state.finish("completed")
    assert [item.type for item in state.response().output] == ["message"]
    assert "output_text.delta" in types(state)
    untouched = state_of()
    untouched.finish("cancelled")
    assert untouched.response().output == []


def check_stack(state: ResponseState) -> None:
    """What opens is closed, in order; numbers, indices and ids agree; nothing is lost."""
    events: list[Any] = list(events_from(state, 0))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    open_item: Any = None
    open_part, deltas, index = False, [], -1
    items: list[Any] = []
    for event in events:
        kind = event.type.removeprefix("response.")
        if kind == "output_item.added":
            assert open_item is None
            open_item, deltas, index = event.item, [], index + 1
            assert event.item.status == "in_progress"
        elif kind == "output_item.done":
            assert not open_part and deltas and event.item.id == open_item.id
            items.append(event.item)
            open_item = None
        elif kind == "content_part.added":
            assert not open_part and event.part.text == ""
            open_part = True
        elif kind == "content_part.done":
            assert event.part.text == "".join(deltas)
            open_part = False
        elif kind.endswith(".delta"):
            deltas.append(event.delta)
        elif kind.endswith("_text.done"):
            assert open_part and event.text == "".join(deltas)
        elif kind == "function_call_arguments.done":
            assert event.arguments == "".join(deltas) and event.name == open_item.name
        if hasattr(event, "output_index"):
            assert event.output_index == index
        if hasattr(event, "item_id"):
            assert event.item_id == open_item.id
    if state.done and state.status != "failed":
        assert open_item is None and items == events[-1].response.output


@settings(max_examples=60)
@given(answers(), st.sampled_from(ENDS), st.booleans())
def test_any_answer(deltas: list[list[Event]], end: Status, background: bool) -> None:
    state = state_of(background=background)
    written: list[Any] = list(events_from(state, 0))
    for delta in deltas:
        add(state, delta)
        written += events_from(state, len(written))
        check_stack(state)
    state.finish(end)
    written += events_from(state, len(written))
    check_stack(state)
    for number in range(len(written) + 2):  # a late client gets the same
        late = list(events_from(state, number))
        assert [event.sequence_number for event in late] == list(range(number, len(written)))
        assert [event.type for event in late] == [event.type for event in written[number:]]
    if end != "failed":
        assert "".join(
            event.delta for event in written if event.type == "response.output_text.delta"
        ) == "".join(event.text for delta in deltas for event in delta if event.kind == "content")


@settings(max_examples=60)
@given(answers(), st.sampled_from(ENDS), st.data())
def test_a_copy_that_follows(deltas: list[list[Event]], end: Status, data: st.DataObject) -> None:
    """It asks now and then, a change may reach it twice, and it sees the same events."""
    state = state_of()
    copy = pickle.loads(pickle.dumps(state.snapshot()))
    written: list[Any] = []

    def sync() -> None:
        progress = pickle.dumps(state.progress())
        for _ in range(data.draw(st.integers(1, 2))):
            copy.apply(pickle.loads(progress))
        written.extend(events_from(copy, len(written)))
        assert copy.version == state.version
        assert copy.response() == state.response()

    for delta in deltas:
        add(state, delta)
        if data.draw(st.booleans()):
            sync()
    state.finish(end)
    sync()
    assert written == list(events_from(state, 0))
    again = state_of()
    again.apply(state.progress())
    assert again.response() == state.response()


def test_a_snapshot_shares_nothing_with_its_state() -> None:
    state = state_of()
    add(state, [TEXT])
    progress, snapshot = state.progress(), state.snapshot()
    copy = state_of()
    copy.apply(progress)
    add(state, [Event("content", "!")])
    assert [item.text for item in progress["output"].items] == ["look"]
    assert [item.text for item in copy.output.items] == ["look"]
    assert [item.text for item in snapshot.output.items] == ["look"]
    assert [item.text for item in state.output.items] == ["look!"]
