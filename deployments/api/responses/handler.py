"""POST /v1/responses."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from rayfin.actors.errors import RayfinError, RequestFailed
from rayfin.actors.messages import SessionRef
from rayfin.actors.sampling_params import SamplingParams
from rayfin.actors.timing import SSE_COMMENT_SECONDS
from rayfin.deployments.api.responses.bodies import OUR_NAMES, ResponseRequest
from rayfin.deployments.api.responses.events import events_from, sse
from rayfin.deployments.api.responses.items import check_calls, input_items
from rayfin.deployments.api.responses.prompt import history_of, prompt_of
from rayfin.deployments.api.responses.replies import (
    CallItem,
    ConversationRef,
    Item,
    RawMessage,
    Response,
    ResponseStreamEvent,
    Status,
)
from rayfin.deployments.api.responses.state import ResponseState
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.api.responses.tools import (
    answer_rules,
    asked_reasoning,
    repeated_tools,
)
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import Deltas, Generation
from rayfin.deployments.generation.logprobs import LogprobsWriter
from rayfin.deployments.generation.plan import plan_answers
from rayfin.deployments.generation.route import GenerationAdapter, opened, while_connected
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import rename_error_params
from rayfin.deployments.http.sse import EventStream
from rayfin.deployments.text.output import TextDelta
from rayfin.deployments.text.parsing.events import Event

logger = logging.getLogger("rayfin.http")


class ResponseAdapter(GenerationAdapter):
    """One request for a response, which ends with its client or runs in the background."""

    least_items = 1  # that ``truncation: auto`` leaves

    def __init__(
        self,
        service: OpenAIService,
        store: ResponseStoreClient,
        body: ResponseRequest,
        tenant: str,
    ) -> None:
        self._service = service
        self._store = store
        self._body = body
        self._tenant = tenant
        self._model = service.name
        self._id = f"resp_{uuid.uuid4().hex}"
        self._sent = 0  # events
        self.streamed = bool(body.stream)

    async def start(self, request: Request, headers: dict[str, str]) -> HttpResponse:
        """Starts a background response and returns it as it stands, or the stream of its events."""
        generation = await while_connected(request, self.prepare(request))
        headers |= generation.headers
        await opened(self, request, generation)
        state = self._state
        state.task = asyncio.create_task(self._run_out(self.run(generation)))
        if self.streamed:
            seconds = generation.comment_seconds
            return event_stream(self._store.follow(state, 0), headers, seconds)
        return reply(state, headers)

    async def open(self, request: Request, generation: Generation) -> None:
        if self._body.stored:
            await self._store.add(self._state)

    def discard(self) -> None:
        if self._body.stored:
            self._store.forget(self._state)  # no client knows its id

    def run(self, generation: Generation) -> Deltas:
        parsed = self._plan.make_parser is not None
        raw = self._raw_messages if self._body.enable_response_messages else None
        deltas, settle = generation.run(), self._store.settle
        return drive(self._state, deltas, settle, self._keep, self._writer(), raw, parsed=parsed)

    async def _keep(self, ended: ResponseState) -> None:
        """Adds the response to its conversation."""
        if (conversation := ended.created.conversation) is None:
            return
        added = {"added": ended.conversation()[len(ended.history) :]}
        try:
            await self._store.call("change_conversation", conversation.id, self._tenant, added)
        except RayfinError as error:
            logger.warning("The conversation %s does not go on: %s", conversation.id, error)

    def reply(self, generation: Generation) -> str:
        return self._state.response().model_dump_json()

    def opening(self) -> list[str]:
        return self._new_events()

    def events(self, choice: Choice, delta: TextDelta) -> list[str]:
        return self._new_events()

    def failure(self, error: Exception) -> list[str]:
        _log(error)
        return self._new_events()

    def _new_events(self) -> list[str]:
        events = list(events_from(self._state, self._sent))
        self._sent += len(events)
        return [sse(event) for event in events]

    async def prepare(self, request: Request) -> Generation:
        """Checks the body, and creates the response and its engine request."""
        body, service = self._body, self._service
        caller = Caller.of(request, body)
        body.check()
        params = body.sampling_params(service.sampling_defaults)
        items = self.items()
        history, root = await history_of(self._store, body, self._tenant)
        if root and caller.session is None:  # as if its clients had named it
            caller = replace(caller, session=SessionRef(root))
        check_calls(history, items)
        conversation = history + items
        rules = answer_rules(body, conversation)
        prompt = await prompt_of(
            service, body, conversation, body.max_output_tokens or 1, self.least_items
        )
        self._plan = await plan_answers(
            service,
            rules,
            prompt.opening,
            earlier_calls=sum(isinstance(item, CallItem) for item in conversation),
            tenant=caller.tenant,
        )
        with rename_error_params(OUR_NAMES):
            generation = await Generation.prepare(
                service,
                [Prompt.of(prompt, "input", body.cache_salt)],
                params,
                request_id=self._id,
                priority=body.priority or 0,
                caller=caller,
                plan=self._plan,
            )
        self._state = ResponseState(
            self._created(params), self._tenant, history, items, len(prompt.ids)
        )
        self._state.root = root
        self._state.page_size = generation.choices[0].page_size
        return generation

    def items(self) -> list[Item]:
        """Returns the items of the input."""
        return input_items(self._body.input)

    def _writer(self) -> LogprobsWriter | None:
        body = self._body
        if not body.has_logprobs:
            return None
        return LogprobsWriter(self._service.tokenizer, body.top_logprobs)

    def _raw_messages(self, choice: Choice) -> list[RawMessage]:
        decode = self._service.tokenizer.decode
        return [
            RawMessage(message=decode(ids, skip_special_tokens=False), tokens=ids)
            for ids in (choice.prompt.ids, choice.token_ids)
        ]

    def _created(self, params: SamplingParams) -> Response:
        body = self._body
        named = body.conversation_id()
        return Response(
            id=self._id,
            created_at=int(time.time()),
            status="queued" if body.background else "in_progress",
            model=self._model,
            background=bool(body.background),
            conversation=None if named is None else ConversationRef(id=named),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id or None,
            prompt_cache_key=body.prompt_cache_key,
            safety_identifier=body.safety_identifier,
            store=body.stored,
            temperature=params.temperature,
            reasoning=asked_reasoning(body),
            text={"format": (body.text or {}).get("format") or {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=repeated_tools(body),
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
        )

    async def _run_out(self, deltas: Deltas) -> None:
        """Runs a background response to its end; its state keeps a failure."""
        with self._service.load.one_more():
            try:
                async with aclosing(deltas):
                    async for _ in deltas:
                        pass
            except Exception as error:
                _log(error)


def reply(state: ResponseState, headers: dict[str, str] | None = None) -> HttpResponse:
    """Returns the response as it stands, as JSON."""
    return HttpResponse(state.response().model_dump_json(), 200, headers, "application/json")


def event_stream(
    events: AsyncGenerator[ResponseStreamEvent, None],
    headers: dict[str, str] | None = None,
    comment_seconds: float = SSE_COMMENT_SECONDS,
) -> EventStream:
    """Returns the events of a response that keeps running if they are not read."""
    texts = (sse(event) async for event in events)
    return EventStream(texts, events, headers, comment_seconds=comment_seconds)


def _log(error: Exception) -> None:
    if isinstance(error, RayfinError):
        logger.warning("A response failed: %s", error)
    else:
        logger.error("A response failed", exc_info=error)


async def drive(
    state: ResponseState,
    deltas: Deltas,
    ended: Callable[[ResponseState], Awaitable[None]],
    keep: Callable[[ResponseState], Awaitable[None]],
    writer: LogprobsWriter | None = None,
    raw: Callable[[Choice], list[RawMessage]] | None = None,
    *,
    parsed: bool = False,
) -> Deltas:
    """Yields ``deltas`` after it has added each of them to ``state``.

    Closing it early aborts the generation and cancels the response. A failure is kept in the state,
    then raised. ``ended`` is awaited at the end in any case, and before the last delta is yielded;
    ``keep`` before a whole response can be seen to have ended, with a copy that has.
    With a ``writer`` the state gets log probabilities, with ``raw`` its messages at the end. Deltas
    that are ``parsed`` have events.
    """
    try:
        async with aclosing(deltas):
            async for choice, delta in deltas:
                for part in delta.split():
                    logprobs = writer.chat(part.token_ids, part.logprobs).content if writer else []
                    state.append(
                        part.events if parsed else [Event("content", part.text)],
                        len(choice.token_ids),
                        choice.cached_tokens,
                        reasoning_tokens=choice.reasoning_tokens,
                        logprobs=logprobs,
                        call_ids=[call.id for call in choice.calls],
                        tools=choice.parsed.plan.tools,
                    )
                if delta.finish_reason == "abort":
                    raise RequestFailed("The engine aborted this response.")
                if delta.finish_reason is not None:
                    state.raw = [] if raw is None else raw(choice)
                    status: Status = (
                        "incomplete" if delta.finish_reason == "length" else "completed"
                    )
                    whole = state.snapshot()
                    whole.finish(status)
                    await keep(whole)
                    state.finish(status)
                    await ended(state)  # the client's next request may reach another replica
                yield choice, delta
    except Exception as error:
        state.fail(error)
        raise
    finally:
        state.finish("cancelled")
        await ended(state)
