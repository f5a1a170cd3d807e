"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.edge.caller import Caller
from rayfin.deployments.openai.beams import search_params, text_params
from rayfin.deployments.openai.bodies import ChatCompletionRequest
from rayfin.deployments.openai.choice import Choice, Prompt
from rayfin.deployments.openai.generation import (
    Deltas,
    Generation,
    after,
    first_of,
    while_connected,
)
from rayfin.deployments.openai.prompts import chat_ids
from rayfin.deployments.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
)
from rayfin.deployments.openai.service import OpenAIService
from rayfin.deployments.openai.sse import EventStream, closed_by_done, event
from rayfin.deployments.text.output import TextDelta


class ChatHandler:
    """Answers one chat completion request."""

    def __init__(self, service: OpenAIService, body: ChatCompletionRequest) -> None:
        self._service = service
        self._body = body
        self._model = service.served_name(body.model)
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def answer(self, request: Request, headers: dict[str, str]) -> Response:
        """The whole message, or the stream of its chunks once the first token is there."""
        body = self._body
        try:
            search = search_params(body, body.token_limit())
            params = (
                body.sampling_params(self._service.sampling_defaults, body.token_limit())
                if search is None
                else text_params(body, search)
            )
            generation = await Generation.prepare(
                self._service,
                [Prompt(await self._prompt_ids(), "messages")],
                params,
                request_id=self._id,
                priority=body.priority or 0,
                caller=Caller.of(request),
                search=search,
            )
        except InvalidRequest as error:
            if error.param == "max_tokens" and body.max_tokens is None:
                error.param = "max_completion_tokens"
            raise
        deltas = generation.run()
        if not body.stream:
            await while_connected(request, generation.finish(deltas))
            return Response(self._reply(generation), 200, headers, "application/json")
        first = await first_of(request, deltas)
        events = self._events(generation, after(first, deltas))
        return EventStream(closed_by_done(events), deltas, headers)

    async def _prompt_ids(self) -> list[int]:
        body = self._body
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        return await chat_ids(
            self._service,
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            variables=variables,
        )

    def _reply(self, generation: Generation) -> str:
        with_ids = bool(self._body.return_token_ids)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=ChatMessage(content="".join(choice.text)),
                    finish_reason=choice.last.finish_reason,
                    stop_reason=choice.last.stop_reason,
                    token_ids=choice.token_ids if with_ids else None,
                )
                for choice in generation.choices
            ],
            usage=generation.usage(),
            prompt_token_ids=generation.prompts[0].ids if with_ids else None,
        ).model_dump_json()

    async def _events(self, generation: Generation, deltas: Deltas) -> AsyncGenerator[str, None]:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=[])
        continuous = self._body.continuous_usage
        started: set[int] = set()
        async for choice, delta in deltas:
            if choice.index not in started:
                started.add(choice.index)
                opening = ChatDelta(role="assistant", content="")
                chunk.choices = [ChatChunkChoice(index=choice.index, delta=opening)]
                chunk.usage = generation.usage() if continuous else None
                if self._body.return_token_ids:
                    chunk.prompt_token_ids = generation.prompts[0].ids
                yield event(chunk)
                chunk.prompt_token_ids = None
            if not (delta.text or delta.finish_reason or self._body.return_token_ids):
                continue
            chunk.choices = [self._choice(choice, delta)]
            chunk.usage = generation.usage() if continuous else None
            yield event(chunk)
        if self._body.include_usage:
            chunk.choices, chunk.usage = [], generation.usage()
            yield event(chunk)

    def _choice(self, choice: Choice, delta: TextDelta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(content=delta.text or None),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._body.return_token_ids else None,
        )
