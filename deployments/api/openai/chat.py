"""POST /v1/chat/completions."""

from starlette.requests import Request

from rayfin.actors.messages import TokenLogprob
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.api.openai.adapter import CompletionAdapter
from rayfin.deployments.api.openai.bodies import ChatCompletionRequest
from rayfin.deployments.api.openai.messages import MessageWriter
from rayfin.deployments.api.openai.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
)
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import Generation
from rayfin.deployments.generation.logprobs import (
    ChatLogprobs,
    LogprobsWriter,
    PromptLogprobs,
    prompt_logprobs,
)
from rayfin.deployments.generation.plan import OutputPlan, plan_answers
from rayfin.deployments.generation.prompts import chat_prompt, thinking_variables
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.sse import event
from rayfin.deployments.requests.prompts import truncated
from rayfin.deployments.text.messages import count_calls, plain_messages
from rayfin.deployments.text.opening import ChatPrompt
from rayfin.deployments.text.output import TextDelta


class ChatAdapter(CompletionAdapter):
    """One chat completion request."""

    def __init__(self, service: OpenAIService, body: ChatCompletionRequest) -> None:
        super().__init__(service, body, "chatcmpl")
        self._body = body
        self._opening = ""  # what the template puts into the model's mouth
        field, hidden = service.formats.reasoning_field, body.include_reasoning is False
        self._messages = MessageWriter(field, hidden)
        self._started: set[int] = set()  # choices that have had their first event
        self._chunk = self.chunk()
        self._writer = LogprobsWriter(
            service.tokenizer, body.top_logprobs, bool(body.return_tokens_as_token_ids)
        )

    def param_names(self) -> dict[str, str]:
        names = {"logprobs": "top_logprobs"} if self._body.top_logprobs else {}
        if self._body.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    async def prompts(self, params: SamplingParams) -> list[Prompt]:
        side = self._body.truncation_side or "left"
        prompt = await self._prompt()
        self._opening = prompt.opening
        ids = truncated(prompt.ids, params, self._service.max_model_len, side)
        return [Prompt(ids, "messages", self._echo(), self._body.cache_salt)]

    async def plan(self, caller: Caller) -> OutputPlan:
        body = self._body
        return await plan_answers(
            self._service,
            body.answer_rules(),
            self._opening,
            earlier_calls=count_calls(body.messages),
            tenant=caller.tenant,
        )

    async def open(self, request: Request, generation: Generation) -> None:
        await super().open(request, generation)
        if self.streamed:
            self._started = self._cursor.begun()
            self._chunk = self.chunk()
            self._chunk.prompt_text = None if self._started else self._prompt_text(generation)

    @property
    def _role(self) -> str:
        """The role of the answer: the last message's if the template begins no new one."""
        if self._body.add_generation_prompt is not False and not self._body.continue_final_message:
            return "assistant"
        return str(self._body.messages[-1]["role"])

    def _echo(self) -> str:
        """The last message, if the answer continues it."""
        if not self._body.echo:
            return ""
        last = plain_messages(self._body.messages)[-1]
        return str(last["content"]) if last["role"] == self._role else ""

    async def _prompt(self) -> ChatPrompt:
        body = self._body
        return await chat_prompt(
            self._service,
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            variables=thinking_variables(body.chat_template_kwargs, body.reasoning_effort),
            any_length=body.truncate_prompt_tokens is not None,
        )

    def reply(self, generation: Generation) -> str:
        with_ids = bool(self._body.return_token_ids)
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=self._messages.message(choice, self._role),
                    logprobs=self._logprobs(choice.token_ids, choice.logprobs),
                    finish_reason=choice.finish_reason,
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

    def chunk(self) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=[])

    def events(self, choice: Choice, delta: TextDelta) -> list[str]:
        body, chunk = self._body, self._chunk
        events = [] if choice.index in self._started else self._first_events(choice)
        chunk.usage = self._generation.usage() if body.continuous_usage else None
        if choice.parsed.plan.make_parser is not None:
            return events + self._part_events(choice, delta)
        self._cursor.advance(choice, delta)
        if delta.text or delta.finish_reason or body.return_token_ids or body.logprobs:
            chunk.choices = [self._choice(choice, delta, ChatDelta(content=delta.text or None))]
            events.append(self._cursor.event(chunk, choice))
        return events

    def _part_events(self, choice: Choice, delta: TextDelta) -> list[str]:
        """One event for each part, and one more for the end. The last has tokens and the rest."""
        body, chunk, writer = self._body, self._chunk, self._messages
        ready, had = self._cursor.gather(choice, delta, writer.count)
        if ready is None:
            return []
        deltas = [writer.delta(part, choice) for part in writer.parts(ready)]
        if ready.finish_reason or not deltas:
            deltas.append(ChatDelta())
        events = []
        for number, part in enumerate(deltas[:-1], start=1):
            if number > had:
                chunk.choices = [ChatChunkChoice(index=choice.index, delta=part)]
                events.append(self._cursor.part(chunk, choice, number))
        self._cursor.advance(choice, ready)
        shown = deltas[-1].model_dump() or ready.finish_reason
        if shown or body.return_token_ids or body.logprobs:
            chunk.choices = [self._choice(choice, ready, deltas[-1])]
            events.append(self._cursor.event(chunk, choice))
        return events

    def _first_events(self, choice: Choice) -> list[str]:
        """The role, and the last message if it is echoed."""
        self._started.add(choice.index)
        events, chunk = [], self._chunk
        opening = ChatDelta(role=self._role, content="")
        chunk.choices = [ChatChunkChoice(index=choice.index, delta=opening)]
        chunk.usage = self._generation.usage() if self._body.continuous_usage else None
        if self._body.return_token_ids:
            chunk.prompt_token_ids = choice.prompt.ids
        if choice.prompt.echo:
            events.append(event(chunk))
            chunk.prompt_token_ids = chunk.prompt_text = None
            echo = ChatDelta(content=choice.prompt.echo)
            chunk.choices = [ChatChunkChoice(index=choice.index, delta=echo)]
        events.append(self._cursor.opening(chunk, choice))
        chunk.prompt_token_ids = chunk.prompt_text = None
        return events

    def _choice(self, choice: Choice, delta: TextDelta, part: ChatDelta) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=choice.index,
            delta=part,
            logprobs=self._logprobs(delta.token_ids, delta.logprobs),
            finish_reason=choice.parsed.finish_reason(delta.finish_reason),
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._body.return_token_ids else None,
        )

    def _logprobs(self, ids: list[int], entries: list[TokenLogprob]) -> ChatLogprobs | None:
        return self._writer.chat(ids, entries) if self._body.logprobs else None

    def _prompt_text(self, generation: Generation) -> str | None:
        """The conversation as the chat template renders it, special tokens included."""
        if not self._body.return_prompt_text:
            return None
        return self._service.tokenizer.decode(generation.prompts[0].ids, False)

    def _prompt_logprobs(self, generation: Generation) -> PromptLogprobs | None:
        asked, prompt = self._body.prompt_logprobs, generation.prompts[0]
        if asked is None:
            return None
        return prompt_logprobs(prompt.ids, prompt.scores, asked, self._service.tokenizer)
