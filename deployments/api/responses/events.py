"""The typed events of a response's stream.

They are a function of the response's state and are not stored: a client that starts late or resumes
(``starting_after``) gets the same events with the same numbers.
"""

from collections.abc import AsyncGenerator, Iterator

from rayfin.deployments.api.responses.replies import (
    ItemEvent,
    OutputMessage,
    OutputTextPart,
    PartEvent,
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
TEXT_DELTA = "response.output_text.delta"
TEXT_DONE = "response.output_text.done"
PART_DONE = "response.content_part.done"
ITEM_DONE = "response.output_item.done"
LAST: dict[Status, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # has no event type; the status says it
    "failed": "response.failed",
}


def events_from(state: ResponseState, number: int) -> Iterator[ResponseStreamEvent]:
    """Yields the events so far, from ``number`` on."""
    opening = _opening(state)
    first_closing = len(opening) + len(state.pieces)
    while number < len(opening):
        yield _event(state, opening[number], number)
        number += 1
    for piece in state.pieces[number - len(opening) :]:
        yield TextDeltaEvent(
            type=TEXT_DELTA,
            sequence_number=number,
            item_id=state.output_id,
            delta=piece.text,
            logprobs=piece.logprobs,
        )
        number += 1
    for kind in _closing(state)[max(0, number - first_closing) :]:
        yield _event(state, kind, number)
        number += 1


async def follow(
    state: ResponseState, number: int = 0
) -> AsyncGenerator[ResponseStreamEvent, None]:
    """Yields the events as they happen, from ``number`` to the last one."""
    while True:
        done, changed = state.done, state.changed()
        for event in list(events_from(state, number)):
            yield event
            number = event.sequence_number + 1
        if done:
            return
        await changed.wait()


def sse(event: ResponseStreamEvent) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"


def _opening(state: ResponseState) -> tuple[str, ...]:
    """Returns the first events: a background response is queued, another starts at once."""
    if state.created.background:
        first, then = (CREATED, QUEUED), (IN_PROGRESS, ITEM_ADDED, PART_ADDED)
        return first + then if state.started else first
    first = (CREATED, IN_PROGRESS)
    return (*first, ITEM_ADDED, PART_ADDED) if state.started else first


def _closing(state: ResponseState) -> tuple[str, ...]:
    if not state.done:
        return ()
    last = LAST[state.status]
    if not state.started or state.status == "failed":
        return (last,)
    return (TEXT_DONE, PART_DONE, ITEM_DONE, last)


def _event(state: ResponseState, kind: str, number: int) -> ResponseStreamEvent:
    """Returns an opening or closing event."""
    item_id = state.output_id
    if kind == ITEM_ADDED:
        item = OutputMessage(id=item_id, status="in_progress", role="assistant", content=[])
        return ItemEvent(type=kind, sequence_number=number, item=item)
    if kind == ITEM_DONE:
        return ItemEvent(type=kind, sequence_number=number, item=state.message())
    text, logprobs = ("", []) if kind == PART_ADDED else (state.text, state.logprobs)
    if kind in (PART_ADDED, PART_DONE):
        part = OutputTextPart(text=text, logprobs=logprobs)
        return PartEvent(type=kind, sequence_number=number, item_id=item_id, part=part)
    if kind == TEXT_DONE:
        return TextDoneEvent(
            type=kind, sequence_number=number, item_id=item_id, text=text, logprobs=logprobs
        )
    early = {CREATED: state.created.status, QUEUED: "queued", IN_PROGRESS: "in_progress"}
    response = state.response()
    if kind in early:
        response = state.created.model_copy(update={"status": early[kind]})
    return ResponseEvent(type=kind, sequence_number=number, response=response)
