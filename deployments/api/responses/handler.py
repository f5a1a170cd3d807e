"""POST /v1/responses."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from rayfin.actors.errors import RayfinError, RequestFailed
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.api.responses.bodies import OUR_NAMES, ResponseRequest
from rayfin.deployments.api.responses.events import events_from, sse
from rayfin.deployments.api.responses.items import input_items
from rayfin.deployments.api.responses.prompt import history_of, prompt_ids
from rayfin.deployments.api.responses.replies import Response, ResponseStreamEvent
from rayfin.deployments.api.responses.state import ResponseState
from rayfin.deployments.generation.choice import Prompt
from rayfin.deployments.generation.generation import (
    Deltas,
    Generation,
    chain_first,
    first_of,
    while_connected,
)
from rayfin.deployments.generation.logprobs import LogprobsWriter
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import rename_error_params
from rayfin.deployments.http.sse import EventStream

logger = logging.getLogger("rayfin.http")

Ticks = AsyncGenerator[None, None]


class ResponseHandler:
    """Answers one request for a response: while its client waits, or in the background."""

    def __init__(self, service: OpenAIService, body: ResponseRequest, tenant: str) -> None:
        self._service = service
        self._body = body
        self._tenant = tenant
        self._model = service.served_name(body.model)
        self._id = f"resp_{uuid.uuid4().hex}"

    async def answer(self, request: Request, headers: dict[str, str]) -> HttpResponse:
        """The response when it has ended, or its events once the first token is there.

        A background response is answered at once; its events are those of whoever follows it.
        """
        body, store = self._body, self._service.responses
        state, generation = await self._prepare(Caller.of(request))
        headers |= generation.headers
        if body.stored:
            await store.add(state)
        ticks = drive(state, generation.run(), store.settle, self._writer())
        if body.background:
            state.task = asyncio.create_task(self._run(ticks))
            if body.stream:
                return event_stream(store.follow(state, 0), headers)
            return reply(state, headers)
        try:
            if body.stream:
                first = await first_of(request, ticks)
            else:
                await while_connected(request, _run_out(ticks))
        except BaseException:
            if body.stored:
                store.forget(state)  # nobody has been told its id
            raise
        if body.stream:
            return EventStream(_events(state, first, ticks), ticks, headers, first)
        return reply(state, headers)

    async def _prepare(self, caller: Caller) -> tuple[ResponseState, Generation]:
        """The response and what will run it, all of it checked."""
        body, service = self._body, self._service
        body.check()
        params = body.sampling_params(service.sampling_defaults)
        items = input_items(body.input)
        history = await history_of(service, body, self._tenant)
        ids = await prompt_ids(service, body, history + items, body.max_output_tokens or 1)
        with rename_error_params(OUR_NAMES):
            generation = await Generation.prepare(
                service,
                [Prompt(ids, "input", cache_salt=body.cache_salt)],
                params,
                request_id=self._id,
                priority=body.priority or 0,
                caller=caller,
            )
        state = ResponseState(self._created(params), self._tenant, history, items, len(ids))
        return state, generation

    def _writer(self) -> LogprobsWriter | None:
        body = self._body
        if not body.tells_logprobs:
            return None
        return LogprobsWriter(self._service.tokenizer, body.top_logprobs)

    def _created(self, params: SamplingParams) -> Response:
        body = self._body
        return Response(
            id=self._id,
            created_at=int(time.time()),
            status="queued" if body.background else "in_progress",
            model=self._model,
            background=bool(body.background),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            prompt_cache_key=body.prompt_cache_key,
            safety_identifier=body.safety_identifier,
            store=body.stored,
            temperature=params.temperature,
            tool_choice=body.tool_choice or "auto",
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
        )

    async def _run(self, ticks: Ticks) -> None:
        """A background response to its end, which the state remembers whichever it is."""
        with self._service.load.one_more():
            try:
                await _run_out(ticks)
            except Exception as error:
                _log(error)


def reply(state: ResponseState, headers: dict[str, str] | None = None) -> HttpResponse:
    """The response as it stands, as JSON."""
    return HttpResponse(state.response().model_dump_json(), 200, headers, "application/json")


def event_stream(
    events: AsyncGenerator[ResponseStreamEvent, None], headers: dict[str, str] | None = None
) -> EventStream:
    """The events of a response that goes on whether or not they are read."""
    return EventStream((sse(event) async for event in events), events, headers)


async def _events(
    state: ResponseState, first: asyncio.Task[None], ticks: Ticks
) -> AsyncGenerator[str, None]:
    """The events of a response that ends with its client. ``first`` takes the first tick."""
    number = 0
    ended = False
    ticks = chain_first(first, ticks)
    async with aclosing(ticks):
        while not ended:
            for event in events_from(state, number):
                yield sse(event)
                number = event.sequence_number + 1
            ended = state.done
            try:
                await anext(ticks, None)
            except Exception as error:
                _log(error)


async def _run_out(ticks: Ticks) -> None:
    async with aclosing(ticks):
        async for _ in ticks:
            pass


def _log(error: Exception) -> None:
    if isinstance(error, RayfinError):
        logger.warning("A response failed: %s", error)
    else:
        logger.error("A response failed", exc_info=error)


# From a generation to the state of a response.


async def drive(
    state: ResponseState,
    deltas: Deltas,
    ended: Callable[[ResponseState], Awaitable[None]],
    writer: LogprobsWriter | None = None,
) -> AsyncGenerator[None, None]:
    """Runs the generation to its end and keeps ``state`` up to date; yields at each change.

    Closing it early aborts the generation and cancels the response. A failure is written down, then
    raised. ``ended`` is awaited at the end, whichever it is. With a ``writer``, log probabilities
    are told too.
    """
    try:
        async with aclosing(deltas):
            async for choice, delta in deltas:
                told = writer.chat(delta.token_ids, delta.logprobs).content if writer else []
                state.append(delta.text, len(choice.token_ids), choice.cached_tokens, told)
                if delta.finish_reason == "abort":
                    raise RequestFailed("The engine aborted this response.")
                if delta.finish_reason is not None:
                    length = delta.finish_reason == "length"
                    state.finish("incomplete" if length else "completed")
                    await ended(state)  # before anybody is told
                yield
    except Exception as error:
        state.fail(error)
        raise
    finally:
        state.finish("cancelled")
        await ended(state)
