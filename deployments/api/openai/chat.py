"""POST /v1/chat/completions."""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from rayfin.actors.messages import Receipt, TokenLogprob
from rayfin.deployments.api.openai.bodies import ChatCompletionRequest
from rayfin.deployments.api.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
)
from rayfin.deployments.generation.beams import search_params, text_params
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import (
    Deltas,
    Generation,
    chain_first,
    first_of,
    in_groups,
    while_connected,
)
from rayfin.deployments.generation.logprobs import (
    ChatLogprobs,
    LogprobsWriter,
    PromptLogprobs,
    prompt_logprobs,
)
from rayfin.deployments.generation.prompts import chat_ids
from rayfin.deployments.generation.resume import Cursor, digest_of
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import rename_error_params
from rayfin.deployments.http.sse import EventStream, closed_by_done, event
from rayfin.deployments.requests.prompts import truncated
from rayfin.deployments.text.messages import plain_messages
from rayfin.deployments.text.output import TextDelta


class ChatHandler:
    """Answers one chat completion request."""

    def __init__(self, service: OpenAIService, body: ChatCompletionRequest) -> None:
        self._service = service
        self._body = body
        self._model = service.served_name(body.model)
        self._id = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._writer = LogprobsWriter(
            service.tokenizer, body.top_logprobs, bool(body.return_tokens_as_token_ids)
        )

    async def answer(self, request: Request, headers: dict[str, str]) -> Response:
        """The whole message, or the stream of its chunks once the first token is there."""
        body = self._body
        theirs = {"logprobs": "top_logprobs"} if body.top_logprobs else {}
        if body.max_tokens is None:
            theirs["max_tokens"] = "max_completion_tokens"
        with rename_error_params(theirs):
            cursor = Cursor.of(request, "chatcmpl", bool(body.stream))
            generation = await self._prepare(Caller.of(request), cursor.request_id)
        headers |= generation.headers
        deltas = generation.run()
        if not body.stream:
            await while_connected(request, generation.finish(deltas))
            reply = await generation.render(self._reply)
            return Response(reply, 200, headers, "application/json")
        receipt = Receipt(self._id, self._created, await digest_of(request))
        receipt = await cursor.open(
            request,
            self._service.client,
            generation.choices,
            receipt,
            seeded=body.seed is not None,
        )
        self._id, self._created = receipt.answer_id, receipt.created
        first = await first_of(request, deltas)
        fresh = in_groups(cursor.untold(chain_first(first, deltas)), body.stream_interval)
        events = self._events(generation, fresh, cursor)
        return EventStream(closed_by_done(events), deltas, headers, first)

    async def _prepare(self, caller: Caller, request_id: str) -> Generation:
        """What will run, all of it checked."""
        body, service = self._body, self._service
        search = search_params(body, body.token_limit())
        params = (
            body.sampling_params(service.sampling_defaults, body.token_limit())
            if search is None
            else text_params(body, search)
        )
        side = body.truncation_side or "left"
        ids = truncated(await self._prompt_ids(), params, service.max_model_len, side)
        return await Generation.prepare(
            service,
            [Prompt(ids, "messages", self._echo(), body.cache_salt)],
            params,
            request_id=request_id,
            priority=body.priority or 0,
            caller=caller,
            search=search,
        )

    @property
    def _role(self) -> str:
        """Whose message the answer is: the last one's, where no turn of the model's is begun."""
        if self._body.add_generation_prompt is not False and not self._body.continue_final_message:
            return "assistant"
        return str(self._body.messages[-1]["role"])

    def _echo(self) -> str:
        """The last message, where the answer goes on with it."""
        if not self._body.echo:
            return ""
        last = plain_messages(self._body.messages)[-1]
        return str(last["content"]) if last["role"] == self._role else ""

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
            any_length=body.truncate_prompt_tokens is not None,
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
                    message=ChatMessage(role=self._role, content="".join(choice.text)),
                    logprobs=self._logprobs(choice.token_ids, choice.logprobs),
                    finish_reason=choice.last.finish_reason,
                    stop_reason=choice.last.stop_reason,
                    token_ids=choice.token_ids if with_ids else None,
                )
                for choice in generation.choices
            ],
            usage=generation.usage(),
            prompt_text=self._prompt_text(generation),
            prompt_token_ids=generation.prompts[0].ids if with_ids else None,
            prompt_logprobs=self._prompt_logprobs(generation),
        ).model_dump_json()

    async def _events(
        self, generation: Generation, deltas: Deltas, cursor: Cursor
    ) -> AsyncGenerator[str, None]:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._model, choices=[])
        continuous = self._body.continuous_usage
        with_tokens = self._body.return_token_ids or self._body.logprobs
        started = cursor.begun()
        chunk.prompt_text = None if started else self._prompt_text(generation)
        async for choice, delta in deltas:
            if choice.index not in started:
                started.add(choice.index)
                opening = ChatDelta(role=self._role, content="")
                chunk.choices = [ChatChunkChoice(index=choice.index, delta=opening)]
                chunk.usage = generation.usage() if continuous else None
                if self._body.return_token_ids:
                    chunk.prompt_token_ids = generation.prompts[0].ids
                if choice.prompt.echo:
                    yield event(chunk)
                    chunk.prompt_token_ids = chunk.prompt_text = None
                    said = ChatDelta(content=choice.prompt.echo)
                    chunk.choices = [ChatChunkChoice(index=choice.index, delta=said)]
                yield cursor.opening(chunk, choice)
                chunk.prompt_token_ids = chunk.prompt_text = None
            cursor.advance(choice, delta)
            if not (delta.text or delta.finish_reason or with_tokens):
                continue
            chunk.choices = [self._choice(choice, delta)]
            chunk.usage = generation.usage() if continuous else None
            yield cursor.event(chunk, choice)
        if self._body.include_usage:
            chunk.choices, chunk.usage = [], generation.usage()
            if (last := cursor.usage(chunk)) is not None:
                yield last

    def _choice(self, choice: Choice, delta: TextDelta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice.index,
            delta=ChatDelta(content=delta.text or None),
            logprobs=self._logprobs(delta.token_ids, delta.logprobs),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._body.return_token_ids else None,
        )

    def _logprobs(self, ids: list[int], told: list[TokenLogprob]) -> ChatLogprobs | None:
        return self._writer.chat(ids, told) if self._body.logprobs else None

    def _prompt_text(self, generation: Generation) -> str | None:
        """What the chat template made of the conversation, special tokens included."""
        if not self._body.return_prompt_text:
            return None
        return self._service.tokenizer.decode(generation.prompts[0].ids, False)

    def _prompt_logprobs(self, generation: Generation) -> PromptLogprobs | None:
        asked, prompt = self._body.prompt_logprobs, generation.prompts[0]
        if asked is None:
            return None
        return prompt_logprobs(prompt.ids, prompt.scores, asked, self._service.tokenizer)
