"""POST /v1/completions."""

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from rayfin.actors.messages import Receipt
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.api.openai.bodies import CompletionRequest
from rayfin.deployments.api.openai.replies import Completion, CompletionChoice
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
    CompletionLogprobs,
    LogprobsWriter,
    prompt_logprobs,
)
from rayfin.deployments.generation.prompts import written_ids
from rayfin.deployments.generation.resume import Cursor, digest_of
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import rename_error_params
from rayfin.deployments.http.sse import EventStream, closed_by_done
from rayfin.deployments.requests.prompts import WrittenPrompt, truncated
from rayfin.deployments.text.output import TextDelta


class CompletionHandler:
    """Answers one completion request."""

    def __init__(self, service: OpenAIService, body: CompletionRequest) -> None:
        self._service = service
        self._body = body
        self._model = service.served_name(body.model)
        self._id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._started: set[int] = set()  # choices that have had their first chunk
        self._writer = LogprobsWriter(
            service.tokenizer, body.logprobs, bool(body.return_tokens_as_token_ids)
        )

    async def answer(self, request: Request, headers: dict[str, str]) -> Response:
        """The whole completion, or the stream of its chunks once the first token is there."""
        body = self._body
        # An echo is told of as the answer is.
        with rename_error_params(
            {"prompt_logprobs": "logprobs"} if body.prompt_logprobs is None else {}
        ):
            cursor = Cursor.of(request, "cmpl", bool(body.stream))
            generation, params = await self._prepare(Caller.of(request), cursor.request_id)
        headers |= generation.headers
        for choice in generation.choices:
            choice.silent = body.scores_only
            if body.stream and params.prompt_logprobs is not None:  # each is echoed with its own
                choice.score_prompt(generation.choices[0])
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
        self._started = cursor.begun()
        first = await first_of(request, deltas)
        fresh = in_groups(cursor.untold(chain_first(first, deltas)), body.stream_interval)
        events = self._events(generation, fresh, cursor)
        return EventStream(closed_by_done(events), deltas, headers, first)

    async def _prepare(self, caller: Caller, request_id: str) -> tuple[Generation, SamplingParams]:
        """What will run, all of it checked."""
        body, service = self._body, self._service
        search = search_params(body, body.token_limit())
        params = (
            body.sampling_params(service.sampling_defaults, body.token_limit())
            if search is None
            else text_params(body, search)
        )
        generation = await Generation.prepare(
            service,
            await self._prompts(params),
            params,
            request_id=request_id,
            priority=body.priority or 0,
            caller=caller,
            search=search,
        )
        return generation, params

    async def _prompts(self, params: SamplingParams) -> list[Prompt]:
        return [await self._prompt(written, params) for written in self._body.prompts()]

    async def _prompt(self, written: WrittenPrompt, params: SamplingParams) -> Prompt:
        body, service = self._body, self._service
        ids = await written_ids(
            service,
            written,
            add_special_tokens=body.add_special_tokens is not False,
            any_length=body.truncate_prompt_tokens is not None,
        )
        side = body.truncation_side or "left"
        kept = truncated(ids, params, service.max_model_len, side)
        echo = ""
        if body.echo:
            whole = written.text is not None and len(kept) == len(ids)
            echo = written.text or "" if whole else service.tokenizer.decode(kept, False)
        return Prompt(kept, written.param, echo, written.cache_salt or body.cache_salt)

    def _reply(self, generation: Generation) -> str:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._whole(choice) for choice in generation.choices],
            usage=generation.usage(),
        ).model_dump_json()

    def _whole(self, choice: Choice) -> CompletionChoice:
        whole = replace(
            choice.last,
            token_ids=choice.token_ids,
            logprobs=choice.logprobs,
            offsets=choice.offsets,
        )
        reply = self._choice(choice, "".join(choice.text), whole, True)
        reply.logprobs = self._logprobs(choice, whole, True)
        if (asked := self._body.prompt_logprobs) is not None:
            prompt, tokenizer = choice.prompt, self._service.tokenizer
            reply.prompt_logprobs = prompt_logprobs(prompt.ids, prompt.scores, asked, tokenizer)
        return reply

    async def _events(
        self, generation: Generation, deltas: Deltas, cursor: Cursor
    ) -> AsyncGenerator[str, None]:
        chunk = Completion(id=self._id, created=self._created, model=self._model, choices=[])
        with_tokens = self._body.return_token_ids or self._body.logprobs is not None
        async for choice, delta in deltas:
            cursor.advance(choice, delta)
            if not (delta.text or delta.finish_reason or delta.token_ids):
                continue  # part of its prompt is computed
            first = choice.index not in self._started
            text = choice.prompt.echo + delta.text if first else delta.text
            if not (text or delta.finish_reason or with_tokens):
                continue
            self._started.add(choice.index)
            reply = self._choice(choice, text, delta, first)
            reply.logprobs = self._logprobs(choice, delta, first)
            chunk.choices = [reply]
            chunk.usage = generation.usage() if self._body.continuous_usage else None
            yield cursor.event(chunk, choice)
        if self._body.include_usage:
            chunk.choices, chunk.usage = [], generation.usage()
            if (last := cursor.usage(chunk)) is not None:
                yield last

    def _choice(self, choice: Choice, text: str, last: TextDelta, first: bool) -> CompletionChoice:
        with_ids = bool(self._body.return_token_ids)
        return CompletionChoice(
            index=choice.index,
            text=text,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            token_ids=last.token_ids if with_ids else None,
            prompt_token_ids=choice.prompt.ids if with_ids and first else None,
        )

    def _logprobs(self, choice: Choice, delta: TextDelta, first: bool) -> CompletionLogprobs | None:
        """Of the tokens of ``delta``; the prompt's go before the first ones if it is echoed."""
        if self._body.logprobs is None:
            return None
        prompt = choice.prompt
        offsets = [len(prompt.echo) + offset for offset in delta.offsets]
        written = self._writer.completion(delta.token_ids, delta.logprobs, offsets)
        if first and self._body.echo:
            written = self._writer.echo(prompt.ids, prompt.scores, prompt.echo).then(written)
        return written
