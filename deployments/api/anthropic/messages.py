"""POST /v1/messages."""

import logging
import uuid
from collections.abc import Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import NamedTuple

from pydantic import BaseModel
from starlette.requests import Request

from rayfin.actors.errors import ContextLengthExceeded, RayfinError, RequestFailed
from rayfin.actors.messages import Pin
from rayfin.deployments.api.anthropic.blocks import BlockEvent, ReplyBlocks
from rayfin.deployments.api.anthropic.bodies import OUR_NAMES, MessagesRequest, PromptBody
from rayfin.deployments.api.anthropic.cache_control import WHOLE, cache_mark, common_length
from rayfin.deployments.api.anthropic.conversation import chat_messages, is_continued
from rayfin.deployments.api.anthropic.replies import (
    AnthropicEvent,
    AnthropicMessage,
    AnthropicUsage,
    MessageDelta,
    MessageStart,
    Stop,
    StopReason,
    ThinkingTokens,
)
from rayfin.deployments.api.anthropic.tools import (
    answer_rules,
    shows_thinking,
    template_variables,
)
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import Deltas, Generation
from rayfin.deployments.generation.plan import plan_answers
from rayfin.deployments.generation.prompts import chat_prompt, shown_tools
from rayfin.deployments.generation.route import GenerationAdapter
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.anthropic_errors import error_event
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import rename_error_params
from rayfin.deployments.text.generation_prompt import ChatPrompt
from rayfin.deployments.text.messages import PlainTools, count_calls
from rayfin.deployments.text.output import TextDelta
from rayfin.deployments.text.parsing.events import Event

logger = logging.getLogger("rayfin.http")


class MessagesPrompt(NamedTuple):
    """A rendered conversation."""

    chat: ChatPrompt
    calls: int  # in it


async def prompt_of(
    service: OpenAIService, body: PromptBody, *, any_length: bool = False
) -> MessagesPrompt:
    """Returns the prompt of a conversation; with ``any_length`` also of one that is too long.

    Raises:
        InvalidRequest: the body is malformed, the chat template refuses it, or it cannot fit.
    """
    body.check()
    chat = chat_messages(body.messages, body.system, body.definitions())
    rendered = await chat_prompt(
        service,
        chat,
        tools=_shown_tools(service, body),
        continue_final_message=is_continued(chat),
        variables=template_variables(body),
        any_length=any_length,
    )
    return MessagesPrompt(rendered, count_calls(chat))


def _shown_tools(service: OpenAIService, body: PromptBody) -> PlainTools | None:
    barred = (body.tool_choice or {}).get("type") == "none"
    return shown_tools(service, body.offered_tools, barred)


@contextmanager
def known_words() -> Iterator[None]:
    """Says that a prompt is too long as Anthropic does: clients read the numbers, and compact.

    Raises:
        ContextLengthExceeded: the body raised it.
    """
    try:
        yield
    except ContextLengthExceeded as error:
        if error.tokens is None:
            raise
        tokens, limit = error.tokens
        message = f"prompt is too long: {tokens} tokens > {limit} maximum"
        raise ContextLengthExceeded(message) from error


class MessagesAdapter(GenerationAdapter):
    """One request for a message."""

    opens_late = True  # message_start has the cached tokens

    def __init__(self, service: OpenAIService, body: MessagesRequest) -> None:
        self._service = service
        self._body = body
        self._model = service.name
        self._id = f"msg_{uuid.uuid4().hex}"
        self._http_request_id = ""
        self._blocks = ReplyBlocks(shows_thinking=shows_thinking(body))
        self.streamed = bool(body.stream)

    async def prepare(self, request: Request) -> Generation:
        with known_words():
            return await self._prepare(request)

    async def _prepare(self, request: Request) -> Generation:
        params = self._body.sampling_params(self._service.sampling_defaults)
        rules = answer_rules(self._body, thinks=self._service.formats.reasoning is not None)
        caller = Caller.of(request, self._body)
        self._mark = cache_mark(self._body)
        prompt = await prompt_of(self._service, self._body)
        self._plan = await plan_answers(
            self._service,
            rules,
            prompt.chat.opening,
            earlier_calls=prompt.calls,
            tenant=caller.tenant,
        )
        with rename_error_params(OUR_NAMES):
            generation = await Generation.prepare(
                self._service,
                [Prompt.of(prompt.chat, "messages")],
                params,
                request_id=self._id,
                priority=0,
                caller=caller,
                plan=self._plan,
            )
        self._choice = generation.choices[0]
        self._choice.request.pin = await self._pin(prompt.chat.ids)
        self._choice.request.timed = self.streamed
        self._http_request_id = getattr(request.state, "request_id", "")
        return generation

    async def _pin(self, ids: list[int]) -> Pin | None:
        """Returns how much of the prompt ``ids`` is kept: what is before the mark."""
        mark, body = self._mark, self._body
        if mark is None:
            return None
        if mark.messages == WHOLE:
            return Pin(len(ids), mark.seconds)
        # A template may refuse a system message alone, and differs from here on in any case.
        shown = list(body.messages[: mark.messages]) or [{"role": "user", "content": "-"}]
        try:
            part = await chat_prompt(
                self._service,
                chat_messages(shown, body.system, body.definitions(), is_part=True),
                tools=_shown_tools(self._service, body),
                add_generation_prompt=False,
                variables=template_variables(body),
                any_length=True,
            )
        except RayfinError:  # a part need not stand alone, and media may be gone: it is not pinned
            return None
        return Pin(common_length(ids, part.ids), mark.seconds)

    def run(self, generation: Generation) -> Deltas:
        deltas = generation.run()
        return deltas if self.streamed else self._gather(deltas)

    async def _gather(self, deltas: Deltas) -> Deltas:
        """Yields ``deltas`` after it has added each of them to the blocks."""
        async with aclosing(deltas):
            async for choice, delta in deltas:
                self._push(choice, delta)
                yield choice, delta

    def reply(self, generation: Generation) -> str:
        return self._message(generation.choices[0]).model_dump_json()

    def opening(self) -> Iterable[str]:
        usage = self._usage(self._choice, output_tokens=0)
        empty = AnthropicMessage(id=self._id, model=self._model, content=[], usage=usage)
        yield _sse(MessageStart(message=empty))
        yield _sse(AnthropicEvent(type="ping"))

    def events(self, choice: Choice, delta: TextDelta) -> list[str]:
        return [_sse(event) for event in self._push(choice, delta)]

    def closing(self) -> Iterable[str]:
        for event in self._blocks.stop():
            yield _sse(event)
        usage = self._usage(self._choice)
        yield _sse(MessageDelta(delta=self._stop(self._choice), usage=usage))
        yield _sse(AnthropicEvent(type="message_stop"))

    def failure(self, error: Exception) -> Iterable[str]:
        if not isinstance(error, RayfinError):
            logger.exception("A stream failed")
        return [error_event(error, self._http_request_id)]

    def _push(self, choice: Choice, delta: TextDelta) -> list[BlockEvent]:
        events = delta.events if self._plan.make_parser else [Event("content", delta.text)]
        return self._blocks.push(events, [call.id for call in choice.calls])

    def _message(self, choice: Choice) -> AnthropicMessage:
        stop = self._stop(choice)
        return AnthropicMessage(
            id=self._id,
            model=self._model,
            content=self._blocks.content(),
            stop_reason=stop.stop_reason,
            stop_sequence=stop.stop_sequence,
            usage=self._usage(choice),
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
        elif choice.parsed.whole_calls:
            reason = "tool_use"
        return Stop(stop_reason=reason, stop_sequence=None)

    def _usage(self, choice: Choice, output_tokens: int | None = None) -> AnthropicUsage:
        thought = ThinkingTokens(thinking_tokens=choice.reasoning_tokens)
        created, pin = choice.written_tokens, choice.request.pin
        if pin is not None:
            created = min(created, max(0, pin.tokens - choice.cached_tokens))
        return AnthropicUsage(
            input_tokens=len(choice.prompt.ids) - choice.cached_tokens - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=choice.cached_tokens,
            output_tokens=len(choice.token_ids) if output_tokens is None else output_tokens,
            output_tokens_details=thought if self._plan.reasons else None,
        )


def _sse(event: BaseModel) -> str:
    kind = event.type  # type: ignore[attr-defined]  # every event has one
    return f"event: {kind}\ndata: {event.model_dump_json()}\n\n"
