"""POST /v1/messages."""

import logging
import uuid
from collections.abc import Iterable

from pydantic import BaseModel
from starlette.requests import Request

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
from rayfin.deployments.generation.generation import Generation
from rayfin.deployments.generation.prompts import chat_ids
from rayfin.deployments.generation.route import GenerationAdapter
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.anthropic_errors import error_event
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.text.output import TextDelta

logger = logging.getLogger("rayfin.http")


async def prompt_ids(
    service: OpenAIService, body: PromptBody, *, any_length: bool = False
) -> list[int]:
    """Returns the token ids of a conversation; with ``any_length`` also of one that is too long.

    Raises:
        InvalidRequest: the body is malformed, the chat template refuses it, or it cannot fit.
    """
    body.check()
    chat = chat_messages(body.messages, body.system)
    continued = is_continued(chat)
    return await chat_ids(service, chat, continue_final_message=continued, any_length=any_length)


class MessagesAdapter(GenerationAdapter):
    """One request for a message."""

    def __init__(self, service: OpenAIService, body: MessagesRequest) -> None:
        self._service = service
        self._body = body
        self._model = service.served_name(body.model)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._http_request_id = ""
        self.streamed = bool(body.stream)

    async def prepare(self, request: Request) -> Generation:
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
        self._choice = generation.choices[0]
        self._http_request_id = getattr(request.state, "request_id", "")
        return generation

    def reply(self, generation: Generation) -> str:
        return self._message(generation.choices[0]).model_dump_json()

    def opening(self) -> Iterable[str]:
        usage = _usage(self._choice)
        empty = AnthropicMessage(id=self._id, model=self._model, content=[], usage=usage)
        yield _sse(MessageStart(message=empty))
        yield _sse(BlockStart())
        yield _sse(AnthropicEvent(type="ping"))

    def events(self, choice: Choice, delta: TextDelta) -> list[str]:
        if not delta.text:
            return []
        return [_sse(BlockDelta(delta=AnthropicTextDelta(text=delta.text)))]

    def closing(self) -> Iterable[str]:
        yield _sse(BlockStop())
        yield _sse(MessageDelta(delta=self._stop(self._choice), usage=_usage(self._choice)))
        yield _sse(AnthropicEvent(type="message_stop"))

    def failure(self, error: Exception) -> Iterable[str]:
        if not isinstance(error, RayfinError):
            logger.exception("A stream failed")
        return [error_event(error, self._http_request_id)]

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
        """Returns why the message ended.

        Raises:
            RequestFailed: the engine aborted the request.
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


def _sse(event: BaseModel) -> str:
    kind = event.type  # type: ignore[attr-defined]  # every event has one
    return f"event: {kind}\ndata: {event.model_dump_json()}\n\n"
