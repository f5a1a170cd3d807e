"""The typed events of a response's stream.

They are a function of the response's state, so that none is kept: whoever comes late, or comes back
(``starting_after``), gets the same events with the same numbers.
"""

from collections.abc import AsyncGenerator, Callable, Iterator
from functools import partial

from rayfin.deployments.openai.responses.replies import (
    Event,
    ItemEvent,
    Message,
    OutputText,
    PartEvent,
    ResponseEvent,
    Status,
    TextDeltaEvent,
    TextDoneEvent,
)
from rayfin.deployments.openai.responses.state import ResponseState

MakeEvent = Callable[[int], Event]  # from its number
LAST: dict[Status, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # there is no event of its own; the status says it
    "failed": "response.failed",
}


def events_from(state: ResponseState, number: int) -> Iterator[Event]:
    """The events that have happened, from the one of that number on."""
    opening = _opening(state)
    deltas = number - len(opening)
    while number < len(opening):
        yield opening[number](number)
        number += 1
    for piece in state.pieces[max(0, deltas) :]:
        yield TextDeltaEvent(
            type="response.output_text.delta",
            sequence_number=number,
            item_id=state.output_id,
            delta=piece,
        )
        number += 1
    first_closing = len(opening) + len(state.pieces)
    for make in _closing(state)[max(0, number - first_closing) :]:
        yield make(number)
        number += 1


async def follow(state: ResponseState, number: int = 0) -> AsyncGenerator[Event, None]:
    """The events from that number on, to the last one, as they happen."""
    while True:
        done, news = state.done, state.news()
        for event in list(events_from(state, number)):
            yield event
            number = event.sequence_number + 1
        if done:
            return
        await news.wait()


def sse(event: Event) -> str:
    return f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"


def _opening(state: ResponseState) -> list[MakeEvent]:
    """How it begins: a background response waits in the queue, another one starts at once."""
    background = state.created.background
    first, then = ("queued", "in_progress") if background else ("in_progress", None)
    events = [partial(_early, state, "created"), partial(_early, state, first)]
    if not state.started:
        return list(events)
    if then is not None:
        events.append(partial(_early, state, then))
    item = Message(id=state.output_id, status="in_progress", role="assistant", content=[])
    return [
        *events,
        partial(_item, "response.output_item.added", item),
        partial(_part, "response.content_part.added", state.output_id, ""),
    ]


def _closing(state: ResponseState) -> list[MakeEvent]:
    if not state.done:
        return []
    last: list[MakeEvent] = [partial(_last, state)]
    if not state.started or state.status == "failed":
        return last
    text = "".join(state.pieces)
    return [
        partial(_text_done, state.output_id, text),
        partial(_part, "response.content_part.done", state.output_id, text),
        partial(_item, "response.output_item.done", state.message()),
        *last,
    ]


def _early(state: ResponseState, name: str, number: int) -> Event:
    status = state.created.status if name == "created" else name
    response = state.created.model_copy(update={"status": status})
    return ResponseEvent(type=f"response.{name}", sequence_number=number, response=response)


def _last(state: ResponseState, number: int) -> Event:
    return ResponseEvent(type=LAST[state.status], sequence_number=number, response=state.response())


def _item(kind: str, item: Message, number: int) -> Event:
    return ItemEvent(type=kind, sequence_number=number, item=item)


def _part(kind: str, item_id: str, text: str, number: int) -> Event:
    part = OutputText(text=text)
    return PartEvent(type=kind, sequence_number=number, item_id=item_id, part=part)


def _text_done(item_id: str, text: str, number: int) -> Event:
    return TextDoneEvent(
        type="response.output_text.done", sequence_number=number, item_id=item_id, text=text
    )
