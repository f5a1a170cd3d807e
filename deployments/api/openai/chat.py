"""POST /v1/chat/completions, and /v1/chat/completions/batch."""

from functools import cached_property
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import TokenLogprob
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.api.openai.adapter import CompletionAdapter
from rayfin.deployments.api.openai.bodies import GIVEN_PROMPT, ChatCompletionRequest
from rayfin.deployments.api.openai.chunks import (
    EMPTY,
    MessageWriter,
    chat_choice,
    content_delta,
    dumped,
    full_chat_choice,
    member,
)
from rayfin.deployments.api.openai.replies import ChatChoice, ChatCompletion
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import Generation
from rayfin.deployments.generation.logprobs import (
    ChatLogprobs,
    LogprobsWriter,
    PromptLogprobs,
    prompt_logprobs,
)
from rayfin.deployments.generation.plan import OutputPlan, plan_answers
from rayfin.deployments.generation.prompt_forms import MEDIA, truncated
from rayfin.deployments.generation.prompts import chat_prompt, shown_tools, thinking_variables
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import renamed_paths
from rayfin.deployments.http.sse import event
from rayfin.deployments.media.embeds_tensor import FIELD as EMBEDS
from rayfin.deployments.text.generation_prompt import ChatPrompt
from rayfin.deployments.text.messages import count_calls, has_parts, plain_messages, text_of
from rayfin.deployments.text.output import TextDelta
from rayfin.deployments.text.parsing.format import thought_start


class ChatAdapter(CompletionAdapter):
    """One chat completion request."""

    def __init__(self, service: OpenAIService, body: ChatCompletionRequest) -> None:
        super().__init__(service, body, "chatcmpl", "chat.completion.chunk")
        self._body = body
        self._opening = ""  # what the template puts into the model's mouth
        field, hidden = service.formats.reasoning_field, body.include_reasoning is False
        self._messages = MessageWriter(field, hidden)
        # As in vLLM, what would show a thought that is left out is left out with it.
        secret = hidden and service.formats.reasoning is not None
        self._with_ids = bool(body.return_token_ids) and not secret
        self._with_logprobs = bool(body.logprobs) and not secret
        self._rich = self._with_ids or self._with_logprobs  # chunks have more than deltas

    def param_names(self) -> dict[str, str]:
        names = {"logprobs": "top_logprobs"} if self._body.top_logprobs else {}
        if self._body.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    async def prompts(self, params: SamplingParams) -> list[Prompt]:
        body, service = self._body, self._service
        given = body.given_prompt()
        self._conversations = body.conversations()
        service.replies.check_prompts(len(self._conversations), "messages")
        prompts = []
        for number, messages in enumerate(self._conversations):
            path = body.conversation_param(number)
            with renamed_paths("messages", path):
                rendered = await self._render(messages, given)
            if number == 0:
                self._opening = rendered.opening
            elif self._thinks_at_first(rendered.opening) != self._thinks_at_first(self._opening):
                raise InvalidRequest(
                    "Either all or none of the conversations of a batch may end in a thought.", path
                )
            side = body.truncation_side or "left"
            whole = MEDIA if rendered.images else "prompt_embeds" if rendered.embeds else ""
            ids = truncated(rendered.ids, params, service.max_model_len, side, uncut=whole)
            param = path if given is None else GIVEN_PROMPT
            echo = self._echo(messages)
            shown = (rendered.images, rendered.embeds, rendered.repairs)
            prompts.append(Prompt(ids, param, echo, body.cache_salt, *shown))
        return prompts

    def _thinks_at_first(self, opening: str) -> bool:
        return thought_start(self._service.formats.reasoning, opening)

    async def plan(self, caller: Caller) -> OutputPlan:
        body = self._body
        return await plan_answers(
            self._service,
            body.answer_rules(),
            self._opening,
            earlier_calls=max(map(count_calls, self._conversations)),
            tenant=caller.tenant,
        )

    def _role(self, messages: Any) -> str:
        """The role of the answer: the last message's if the template begins no new one."""
        if self._body.add_generation_prompt is not False and not self._body.continue_final_message:
            return self._service.replies.response_role
        return str(messages[-1]["role"])

    def _echo(self, messages: Any) -> str:
        """The last message, if the answer continues it."""
        if not self._body.echo:
            return ""
        if has_parts(messages, EMBEDS):
            message = "echo does not go with parts of type prompt_embeds: they are no text."
            raise InvalidRequest(message, "echo")
        last = plain_messages(messages, media=self._service.reads)[-1]
        return text_of(last["content"]) if last["role"] == self._role(messages) else ""

    async def _render(self, messages: Any, given: list[int] | None) -> ChatPrompt:
        body, service = self._body, self._service
        return await chat_prompt(
            service,
            messages,
            given=given,
            chat_template=body.chat_template or None,
            tools=shown_tools(service, body.declared_tools, body.tool_choice == "none"),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            variables=thinking_variables(
                body.chat_template_kwargs, body.reasoning_effort, body.documents
            ),
            any_length=body.truncate_prompt_tokens is not None,
            embeds=True,
        )

    def reply(self, generation: Generation) -> str:
        with_ids = self._with_ids
        roles = [self._role(messages) for messages in self._conversations]
        each = len(generation.choices) // len(roles)
        prompt_ids = generation.prompts[0].shown_ids if len(roles) == 1 else None
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=self._messages.message(choice, roles[choice.index // each]),
                    logprobs=self._logprobs(choice.token_ids, choice.logprobs),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.last.stop_reason,
                    token_ids=choice.token_ids if with_ids else None,
                    weight_versions=self._versions(choice),
                )
                for choice in generation.choices
            ],
            usage=generation.usage(),
            prompt_text=self._prompt_text(generation),
            prompt_token_ids=prompt_ids if self._body.return_token_ids else None,
            prompt_logprobs=self._prompt_logprobs(generation),
            metrics=generation.metrics(),
        ).model_dump_json()

    def events(self, choice: Choice, delta: TextDelta) -> list[str]:
        events = [] if choice.index in self._started else self._first_events(choice)
        parsed = choice.parsed.plan.make_parser is not None
        for part in delta.split(end_apart=self._with_logprobs):
            self._cursor.advance(choice, part)
            written = content_delta(part.text)
            if parsed:
                written = self._messages.delta(part.events, choice)
            # Hidden parts have no event, unless nothing else tells that there was a step.
            if written != EMPTY or part.finish_reason or (part.token_ids and part is delta):
                if parsed or part.text or part.finish_reason or part.token_ids:
                    events.append(self._part_event(choice, part, written))
        return events

    def _first_events(self, choice: Choice) -> list[str]:
        """The role, and the last message if it is echoed."""
        more = ""
        if not self._started:  # the first event of all says what the prompt is
            more = self._prompt_members(choice.prompt.shown_ids)
        self._started.add(choice.index)
        opening = chat_choice(choice.index, self._opening_delta())
        chunk = self._chunk(choice, opening, more)
        if not choice.prompt.echo:
            return [self._cursor.opening(chunk, choice)]
        echo = self._chunk(choice, chat_choice(choice.index, content_delta(choice.prompt.echo)))
        return [event(chunk), self._cursor.opening(echo, choice)]

    def _opening_delta(self) -> str:
        return dumped({"role": self._role(self._conversations[0]), "content": ""})

    def _prompt_members(self, ids: list[int] | None) -> str:
        ids_member = member("prompt_token_ids", ids if self._body.return_token_ids else None)
        return ids_member + member("prompt_text", self._prompt_text(self._generation))

    def _part_event(self, choice: Choice, delta: TextDelta, part: str) -> str:
        """The event of ``delta``, with its tokens and its end."""
        if not (delta.finish_reason or self._rich):
            return self._cursor.event(self._chunk(choice, chat_choice(choice.index, part)), choice)
        written = full_chat_choice(
            choice.index,
            part,
            self._logprobs(delta.token_ids, delta.logprobs),
            delta.token_ids if self._with_ids else None,
            choice.parsed.finish_reason(delta.finish_reason),
            delta.stop_reason,
        )
        written = self._with_versions(written, choice, delta)
        return self._cursor.event(self._chunk(choice, written), choice)

    def _chunk(self, choice: Choice, written: str, more: str = "") -> str:
        return self._frame.chunk(written, self._usage_of(choice), more)

    def _usage_of(self, choice: Choice) -> str:
        if not self._continuous_usage:
            return ""
        thought = None
        if choice.parsed.plan.reasons:
            spoken = min(choice.reasoning_tokens, self._cursor.sent(choice))
            thought = {"reasoning_tokens": spoken}
        return self._usage_so_far(choice, member("completion_tokens_details", thought))

    def _logprobs(self, ids: list[int], entries: list[TokenLogprob]) -> ChatLogprobs | None:
        return self._writer.chat(ids, entries) if self._with_logprobs else None

    @cached_property
    def _writer(self) -> LogprobsWriter:
        body, by_id = self._body, self._names_tokens_by_id()
        named = bool(body.logprob_token_ids)
        return LogprobsWriter(self._service.tokenizer, body.top_logprobs, by_id, named)

    def _prompt_text(self, generation: Generation) -> str | None:
        """The conversation as the chat template renders it, special tokens included.

        None if parts of it are no text.
        """
        ids = generation.prompts[0].shown_ids
        if ids is None or not self._body.return_prompt_text:
            return None
        return self._service.tokenizer.decode(ids, False)

    def _prompt_logprobs(self, generation: Generation) -> PromptLogprobs | None:
        asked, prompt = self._body.prompt_logprobs, generation.prompts[0]
        if asked is None:
            return None
        return prompt_logprobs(prompt.ids, prompt.scores, asked, self._service.tokenizer)
