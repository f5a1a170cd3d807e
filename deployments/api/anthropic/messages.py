"""POST /v1/messages."""

import logging
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from rayfin.actors.errors import RayfinError, RequestFailed
from rayfin.deployments.api.anthropic.bodies import MessagesRequest, PromptBody
from rayfin.deployments.api.anthropic.conversation import chat_messages, is_continued
from rayfin.deployments.api.anthropic.replies import (
    AnthropicEvent,
    AnthropicMessage,
    AnthropicTextDelta,
    AnthropicUsage,
    BlockDelta,
    BlockStart,
    BlockStop,
    MessageDelta,
    MessageStart,
    Stop,
    StopReason,
    TextBlock,
)
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import (
    Deltas,
    Generation,
    chain_first,
    first_of,
    while_connected,
)
from rayfin.deployments.generation.prompts import chat_ids
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.anthropic_errors import error_event
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.sse import EventStream

logger = logging.getLogger("rayfin.http")


async def prompt_ids(
    service: OpenAIService, body: PromptBody, *, any_length: bool = False
) -> list[int]:
    """The token ids of a conversation; ``any_length`` where they are only counted.

    Raises:
        InvalidRequest: it is malformed, the chat template refuses it, or it cannot fit.
    """
    body.check()
    chat = chat_messages(body.messages, body.system)
    continued = is_continued(chat)
    return await chat_ids(service, chat, continue_final_message=continued, any_length=any_length)


class MessagesHandler:
    """Answers one request for a message."""

    def __init__(self, service: OpenAIService, body: MessagesRequest) -> None:
        self._service = service
        self._body = body
        self._model = service.served_name(body.model)
        self._id = f"msg_{uuid.uuid4().hex}"

    async def answer(self, request: Request, headers: dict[str, str]) -> Response:
        """The whole message, or the stream of its events once the first token is there."""
        params = self._body.sampling_params(self._service.sampling_defaults)
        ids = await prompt_ids(self._service, self._body)
        generation = await Generation.prepare(
            self._service,
            [Prompt(ids, "messages")],
            params,
            request_id=self._id,
            priority=0,
            caller=Caller.of(request),
        )
        headers |= generation.headers
        deltas = generation.run()
        if not self._body.stream:
            await while_connected(request, generation.finish(deltas))
            reply = self._message(generation.choices[0]).model_dump_json()
            return Response(reply, 200, headers, "application/json")
        first = await first_of(request, deltas)
        events = self._events(generation.choices[0], chain_first(first, deltas))
        request_id = getattr(request.state, "request_id", "")
        return EventStream(_closed_by_error(events, request_id), deltas, headers, first)

    async def _events(self, choice: Choice, deltas: Deltas) -> AsyncGenerator[str, None]:
        empty = AnthropicMessage(id=self._id, model=self._model, content=[], usage=_usage(choice))
        yield _sse(MessageStart(message=empty))
        yield _sse(BlockStart())
        yield _sse(AnthropicEvent(type="ping"))
        async for _, delta in deltas:
            if delta.text:
                yield _sse(BlockDelta(delta=AnthropicTextDelta(text=delta.text)))
        yield _sse(BlockStop())
        yield _sse(MessageDelta(delta=self._stop(choice), usage=_usage(choice)))
        yield _sse(AnthropicEvent(type="message_stop"))

    def _message(self, choice: Choice) -> AnthropicMessage:
        stop = self._stop(choice)
        return AnthropicMessage(
            id=self._id,
            model=self._model,
            content=[TextBlock(text="".join(choice.text))],
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=_usage(choice),
        )

    def _stop(self, choice: Choice) -> Stop:
        """Why it ended.

        Raises:
            RequestFailed: the engine gave it up.
        """
        last = choice.last
        reason: StopReason = "end_turn"
        if isinstance(last.stop_reason, str):
            return Stop(stop_reason="stop_sequence", stop_sequence=last.stop_reason)
        if last.finish_reason == "length":
            asked = choice.request.stopping.max_tokens == self._body.max_tokens
            reason = "max_tokens" if asked else "model_context_window_exceeded"
        elif last.finish_reason != "stop":
            raise RequestFailed("The engine aborted this request.")
        return Stop(stop_reason=reason, stop_sequence=None)


def _usage(choice: Choice) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=len(choice.prompt.ids) - choice.cached_tokens,
        cache_read_input_tokens=choice.cached_tokens,
        output_tokens=len(choice.token_ids),
    )


async def _closed_by_error(
    events: AsyncGenerator[str, None], request_id: str
) -> AsyncGenerator[str, None]:
    """``events``, then an error if they end in one."""
    async with aclosing(events):
        try:
            async for text in events:
                yield text
        except Exception as error:
            if not isinstance(error, RayfinError):
                logger.exception("A stream failed")
            yield error_event(error, request_id)


def _sse(event: BaseModel) -> str:
    kind = event.type  # type: ignore[attr-defined]  # every event has one
    return f"event: {kind}\ndata: {event.model_dump_json()}\n\n"
