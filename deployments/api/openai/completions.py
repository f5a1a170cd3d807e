"""POST /v1/completions."""

from starlette.requests import Request

from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.api.openai.adapter import CompletionAdapter
from rayfin.deployments.api.openai.bodies import CompletionRequest
from rayfin.deployments.api.openai.chunks import text_choice
from rayfin.deployments.api.openai.replies import Completion, CompletionChoice
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import Generation
from rayfin.deployments.generation.logprobs import (
    CompletionLogprobs,
    LogprobsWriter,
    prompt_logprobs,
)
from rayfin.deployments.generation.prompt_forms import WrittenPrompt, truncated
from rayfin.deployments.generation.prompts import written_ids
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.media.read_embeds import required
from rayfin.deployments.text.output import TextDelta


class TextAdapter(CompletionAdapter):
    """One completion request."""

    def __init__(self, service: OpenAIService, body: CompletionRequest) -> None:
        super().__init__(service, body, "cmpl", "text_completion")
        self._body = body
        self._writer = LogprobsWriter(
            service.tokenizer,
            body.logprobs,
            self._names_tokens_by_id(),
            bool(body.logprob_token_ids),
        )

    def param_names(self) -> dict[str, str]:
        # An echoed prompt has as many log probabilities as the answer.
        return {"prompt_logprobs": "logprobs"} if self._body.prompt_logprobs is None else {}

    async def prepare(self, request: Request) -> Generation:
        generation = await super().prepare(request)
        scored = generation.choices[0].request.sampling.prompt_logprobs is not None
        for choice in generation.choices:
            choice.silent = self._body.scores_only
            if self.streamed and scored:  # each choice echoes the prompt with its own
                choice.score_prompt(generation.choices[0])
        return generation

    async def prompts(self, params: SamplingParams) -> list[Prompt]:
        limit = self._service.replies.max_prompts
        given = self._body.embeds(limit)
        written = self._body.prompts(limit)
        embedded = [await self._embedded(*each, params) for each in given]
        return embedded + [await self._prompt(one, params) for one in written]

    async def _embedded(self, param: str, data: str, params: SamplingParams) -> Prompt:
        """A prompt of embeddings; in an answer they come before those of text, as in vLLM."""
        body, service = self._body, self._service
        info = await service.client.info()
        side = body.truncation_side or "left"

        def cut(places: list[int]) -> list[int]:
            return truncated(places, params, service.max_model_len, side)

        embeds = await required(service.embeds, info, param).read(data, param, info, cut)
        return Prompt([0] * embeds.sent.length, param, "", body.cache_salt, embeds=(embeds,))

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
            shown = service.tokenizer.detokenizer((), skip_special_tokens=False)
            echo = written.text or "" if whole else shown.whole(kept)
        return Prompt(kept, written.param, echo, written.cache_salt or body.cache_salt)

    def reply(self, generation: Generation) -> str:
        return Completion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._whole(choice) for choice in generation.choices],
            usage=generation.usage(),
            metrics=generation.metrics(),
        ).model_dump_json()

    def _whole(self, choice: Choice) -> CompletionChoice:
        body, prompt, whole = self._body, choice.prompt, choice.whole
        scores, with_ids = None, bool(body.return_token_ids)
        if (asked := body.prompt_logprobs) is not None:
            scores = prompt_logprobs(prompt.ids, prompt.scores, asked, self._service.tokenizer)
        return CompletionChoice(
            index=choice.index,
            text=whole.text,
            logprobs=self._logprobs(choice, whole, True),
            finish_reason=whole.finish_reason,
            stop_reason=whole.stop_reason,
            token_ids=choice.token_ids if with_ids else None,
            prompt_token_ids=prompt.shown_ids if with_ids else None,
            prompt_logprobs=scores,
            weight_versions=self._versions(choice),
        )

    def events(self, choice: Choice, delta: TextDelta) -> list[str]:
        self._cursor.advance(choice, delta)
        if not (delta.text or delta.finish_reason or delta.token_ids):
            return []  # a part of the prompt is computed
        first = choice.index not in self._started
        self._started.add(choice.index)
        with_ids = bool(self._body.return_token_ids)
        written = text_choice(
            choice.index,
            choice.prompt.echo + delta.text if first else delta.text,
            self._logprobs(choice, delta, first),
            choice.prompt.shown_ids if with_ids and first else None,
            delta.token_ids if with_ids else None,
            delta.finish_reason,
            delta.stop_reason,
        )
        written = self._with_versions(written, choice, delta)
        chunk = self._frame.chunk(written, self._usage_so_far(choice))
        return [self._cursor.event(chunk, choice)]

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
