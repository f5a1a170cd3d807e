"""POST /v1/completions."""

import time
import uuid
from collections.abc import AsyncGenerator

from starlette.requests import Request
from starlette.responses import Response

from rayfin.deployments.edge.caller import Caller
from rayfin.deployments.openai.beams import search_params, text_params
from rayfin.deployments.openai.bodies import CompletionRequest
from rayfin.deployments.openai.choice import Choice, Prompt
from rayfin.deployments.openai.generation import (
    Deltas,
    Generation,
    after,
    first_of,
    while_connected,
)
from rayfin.deployments.openai.prompts import text_ids
from rayfin.deployments.openai.replies import Completion, CompletionChoice
from rayfin.deployments.openai.service import OpenAIService
from rayfin.deployments.openai.sse import EventStream, closed_by_done, event
from rayfin.deployments.text.output import TextDelta


class CompletionHandler:
    """Answers one completion request."""

    def __init__(self, service: OpenAIService, body: CompletionRequest) -> None:
        self._service = service
        self._body = body
        self._model = service.served_name(body.model)
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._started: set[int] = set()  # choices that have had their first chunk

    async def answer(self, request: Request, headers: dict[str, str]) -> Response:
        """The whole completion, or the stream of its chunks once the first token is there."""
        body = self._body
        search = search_params(body, body.token_limit())
        params = (
            body.sampling_params(self._service.sampling_defaults, body.token_limit())
            if search is None
            else text_params(body, search)
        )
        generation = await Generation.prepare(
            self._service,
            await self._prompts(),
            params,
            request_id=self._id,
            priority=body.priority or 0,
            caller=Caller.of(request),
            search=search,
        )
        deltas = generation.run()
        if not body.stream:
            await while_connected(request, generation.finish(deltas))
            return Response(self._reply(generation), 200, headers, "application/json")
        first = await first_of(request, deltas)
        events = self._events(generation, after(first, deltas))
        return EventStream(closed_by_done(events), deltas, headers)

    async def _prompts(self) -> list[Prompt]:
        written = self._body.prompts()
        return [
            await self._prompt(value, "prompt" if len(written) == 1 else f"prompt[{i}]")
            for i, value in enumerate(written)
        ]

    async def _prompt(self, value: str | list[int], param: str) -> Prompt:
        tokenizer, echo = self._service.tokenizer, bool(self._body.echo)
        if not isinstance(value, str):
            return Prompt(value, param, tokenizer.decode(value, False) if echo else "")
        add = self._body.add_special_tokens is not False
        ids = await text_ids(self._service, value, param, add_special_tokens=add)
        return Prompt(ids, param, value if echo else "")

    def _reply(self, generation: Generation) -> str:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                self._choice(choice, "".join(choice.text), choice.last, choice.token_ids, True)
                for choice in generation.choices
            ],
            usage=generation.usage(),
        ).model_dump_json()

    async def _events(self, generation: Generation, deltas: Deltas) -> AsyncGenerator[str, None]:
        chunk = Completion(id=self._id, created=self._created, model=self._model, choices=[])
        async for choice, delta in deltas:
            first = choice.index not in self._started
            text = choice.prompt.echo + delta.text if first else delta.text
            if not (text or delta.finish_reason or self._body.return_token_ids):
                continue
            self._started.add(choice.index)
            chunk.choices = [self._choice(choice, text, delta, delta.token_ids, first)]
            chunk.usage = generation.usage() if self._body.continuous_usage else None
            yield event(chunk)
        if self._body.include_usage:
            chunk.choices, chunk.usage = [], generation.usage()
            yield event(chunk)

    def _choice(
        self, choice: Choice, text: str, last: TextDelta, token_ids: list[int], first: bool
    ) -> CompletionChoice:
        with_ids = bool(self._body.return_token_ids)
        return CompletionChoice(
            index=choice.index,
            text=text,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            token_ids=token_ids if with_ids else None,
            prompt_token_ids=choice.prompt.ids if with_ids and first else None,
        )
