"""The typed events of a response's stream.

They are a function of the response's state and are not stored: a client that starts late or resumes
(``starting_after``) gets the same events with the same numbers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from rayfin.deployments.api.responses.output import OutputItem, OutputKind, Piece
from rayfin.deployments.api.responses.replies import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    InputDoneEvent,
    ItemEvent,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ResponseEvent,
    ResponseStreamEvent,
    Status,
    TextDeltaEvent,
    TextDoneEvent,
)
from rayfin.deployments.api.responses.state import ResponseState

CREATED = "response.created"
QUEUED = "response.queued"
IN_PROGRESS = "response.in_progress"
ITEM_ADDED = "response.output_item.added"
PART_ADDED = "response.content_part.added"
PART_DONE = "response.content_part.done"
ITEM_DONE = "response.output_item.done"
TEXT_DELTA = "response.output_text.delta"
TEXT_DONE = "response.output_text.done"
REASONING_DELTA = "response.reasoning_text.delta"
REASONING_DONE = "response.reasoning_text.done"
ARGUMENTS_DELTA = "response.function_call_arguments.delta"
ARGUMENTS_DONE = "response.function_call_arguments.done"
INPUT_DELTA = "response.custom_tool_call_input.delta"
INPUT_DONE = "response.custom_tool_call_input.done"
LAST: dict[Status, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # has no event type; the status says it
    "failed": "response.failed",
}


class ItemEvents(NamedTuple):
    """The types of an item's events before and after those of its pieces."""

    first: tuple[str, ...]
    last: tuple[str, ...]
    has_deltas: bool = True  # an event for each of its pieces


EVENTS: dict[OutputKind, ItemEvents] = {
    "message": ItemEvents((ITEM_ADDED, PART_ADDED), (TEXT_DONE, PART_DONE, ITEM_DONE)),
    "reasoning": ItemEvents((ITEM_ADDED, PART_ADDED), (REASONING_DONE, PART_DONE, ITEM_DONE)),
    "function_call": ItemEvents((ITEM_ADDED,), (ARGUMENTS_DONE, ITEM_DONE)),
    "custom_tool_call": ItemEvents((ITEM_ADDED,), (INPUT_DONE, ITEM_DONE)),
    "tool_search_call": ItemEvents((ITEM_ADDED,), (ITEM_DONE,), False),
}


def events_from(state: ResponseState, number: int) -> Iterator[ResponseStreamEvent]:
    """Yields the events so far, from ``number`` on."""
    opening = _opening(state)
    for kind in opening[number:]:
        yield _of_response(state, kind, number)
        number += 1
    first = len(opening)  # number of the next item's first event
    for index, item in enumerate(state.output.items):
        kinds = EVENTS[item.kind]
        ended = item.closed or (state.done and state.status != "failed")
        deltas = len(item.pieces) * kinds.has_deltas
        count = len(kinds.first) + deltas + (len(kinds.last) if ended else 0)
        for place in range(max(0, number - first), count):
            yield _of_item(state, index, place, first + place)
        first += count
        number = max(number, first)
    if state.done and number == first:
        yield _of_response(state, LAST[state.status], number)


def sse(event: ResponseStreamEvent) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"


def _opening(state: ResponseState) -> tuple[str, ...]:
    """Returns the first events: a background response is queued, another starts at once."""
    if not state.created.background:
        return (CREATED, IN_PROGRESS)
    return (CREATED, QUEUED, IN_PROGRESS) if state.started else (CREATED, QUEUED)


def _of_response(state: ResponseState, kind: str, number: int) -> ResponseEvent:
    """Returns the event of the whole response: one of the first ones, or the last one."""
    early = {CREATED: state.created.status, QUEUED: "queued", IN_PROGRESS: "in_progress"}
    if kind in early:
        response = state.created.model_copy(update={"status": early[kind]})
    else:
        response = state.response()
    return ResponseEvent(type=kind, sequence_number=number, response=response)


def _of_item(state: ResponseState, index: int, place: int, number: int) -> ResponseStreamEvent:
    """Returns the event of an item that comes after ``place`` others of it."""
    item = state.output.items[index]
    first, last, has_deltas = EVENTS[item.kind]
    deltas = len(item.pieces) * has_deltas
    piece = place - len(first)
    if 0 <= piece < deltas:
        return _delta(item, index, item.pieces[piece], number)
    kind = first[place] if piece < 0 else last[piece - deltas]
    names: dict[str, Any] = {"type": kind, "sequence_number": number, "output_index": index}
    if kind == ITEM_ADDED:
        return ItemEvent(**names, item=item.opened())
    if kind == ITEM_DONE:
        return ItemEvent(**names, item=item.reply(item.status(state.status)))
    names["item_id"] = item.id
    if kind == ARGUMENTS_DONE:
        return ArgumentsDoneEvent(**names, name=item.name, arguments=item.text)
    if kind == INPUT_DONE:
        return InputDoneEvent(**names, input=item.text)
    if kind == REASONING_DONE:
        return ReasoningDoneEvent(**names, text=item.text)
    if kind == TEXT_DONE:
        return TextDoneEvent(**names, text=item.text, logprobs=item.logprobs)
    whole = item if kind == PART_DONE else replace(item, pieces=[])
    return PartEvent(**names, part=whole.part())


def _delta(item: OutputItem, index: int, piece: Piece, number: int) -> ResponseStreamEvent:
    text, logprobs = piece
    names: dict[str, Any] = {
        "sequence_number": number,
        "output_index": index,
        "item_id": item.id,
        "delta": text,
    }
    if item.is_call:
        kind = INPUT_DELTA if item.kind == "custom_tool_call" else ARGUMENTS_DELTA
        return ArgumentsDeltaEvent(type=kind, **names)
    if item.kind == "reasoning":
        return ReasoningDeltaEvent(type=REASONING_DELTA, **names)
    return TextDeltaEvent(type=TEXT_DELTA, **names, logprobs=logprobs)
