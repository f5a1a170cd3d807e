"""POST /inference/v1/generate: token ids in, token ids out, as in vLLM; streams can be resumed."""

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.api.openai.bodies import CompletionRequest
from rayfin.deployments.api.openai.completions import TextAdapter
from rayfin.deployments.generation.choice import Choice
from rayfin.deployments.generation.generation import Deltas, Generation
from rayfin.deployments.generation.logprobs import (
    ChatLogprobs,
    LogprobsWriter,
    PromptLogprobs,
    prompt_logprobs,
)
from rayfin.deployments.generation.running import RunningRequests
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.generation.usage import Usage
from rayfin.deployments.http.json_body import rename_error_params, validate
from rayfin.deployments.http.request_id import LABEL
from rayfin.deployments.text.checks import missing
from rayfin.deployments.text.logprobs import as_npy, given_scores, kept_masses, sampling_mask
from rayfin.deployments.text.output import TextDelta

IDS = "token_ids"
LACKING = {
    "features": "images and audio go through /v1/chat/completions",
    "content_parts": "images and audio go through /v1/chat/completions",
    "prompt": "a text goes through /v1/completions",
    "kv_transfer_params": "nothing is transferred",
    "ec_transfer_params": "nothing is transferred",
}
"""Members of vLLM's that are refused, and why."""

SCORED = "prompt_logprob_token_ids"
OF_TOKENS = (SCORED, "prompt_logprob_start", "return_sampling_mask")
OF_THE_BODY = frozenset(
    {
        *("prompt", "prompt_embeds", "model", "stream", "stream_options", "cache_salt"),
        *("priority", "echo"),
    }
)
"""Fields of a completion that ``sampling_params`` cannot set."""


class TokensRequest(CompletionRequest):
    """What only requests of token ids may have."""

    prompt_logprob_token_ids: list[list[int]] | list[int] | None = None
    prompt_logprob_start: int | None = None
    return_sampling_mask: bool | None = None

    def sampling_params(self, defaults: dict[str, Any], max_tokens: int | None) -> SamplingParams:
        given = {name: getattr(self, name) for name in OF_TOKENS}
        given = {name: value for name, value in given.items() if value is not None}
        if self.stream and self.prompt_logprob_token_ids is not None:
            raise InvalidRequest(f"{SCORED} cannot be streamed.", SCORED)
        return super().sampling_params({**defaults, **given}, max_tokens)


class GenerateRequest(BaseModel):
    """Token ids, and the settings of vLLM's ``SamplingParams``."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    request_id: str | None = None
    token_ids: list[int] | None = None
    sampling_params: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None  # the prompt's too
    return_weight_versions: bool | None = None
    weight_version: str | None = None
    output_mode: Literal["tokens", "text"] | None = None

    def completion(self, context: int) -> TokensRequest:
        """Returns the same as a completion request, checked; without a limit it fills the context.

        Raises:
            InvalidRequest: a member is missing, wrong, or one that Rayfin lacks.
        """
        for name, why in LACKING.items():
            if (self.model_extra or {}).get(name):
                raise InvalidRequest(f"{name}: {why}.", name, "unsupported_parameter")
        if self.token_ids is None:
            raise missing(IDS)
        if not self.token_ids:
            raise InvalidRequest(f"{IDS} must hold at least one token.", IDS, "empty_array")
        if self.request_id is not None and not LABEL.fullmatch(self.request_id):
            raise InvalidRequest(
                "request_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ -", "request_id"
            )
        given = self.sampling_params or {}
        if fixed := OF_THE_BODY & given.keys():
            shown = ", ".join(sorted(fixed))
            raise InvalidRequest(f"sampling_params must not have {shown}.", "sampling_params")
        beside: dict[str, Any] = {"prompt": self.token_ids, "stream_options": self.stream_options}
        beside |= {"stream": self.stream, "cache_salt": self.cache_salt, "priority": self.priority}
        for name in ("return_weight_versions", "weight_version"):
            if (value := getattr(self, name)) is not None:
                beside[name] = value
        settings = {name: value for name, value in given.items() if value is not None}
        with rename_error_params({"prompt": IDS}):
            return validate({"max_tokens": context, **settings, **beside}, TokensRequest)


class TokenChoice(BaseModel):
    index: int
    token_ids: list[int] | None = None
    text: str | None = None
    logprobs: ChatLogprobs | None = None
    sampling_mask: list[list[int] | None] | None = None
    kept_mass: list[float] | None = None  # of processed log probabilities
    weight_versions: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GenerateReply(BaseModel):
    request_id: str
    choices: list[TokenChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_id_logprobs: str | None = None  # a float32 .npy [rows, K], in base64
    usage: Usage | None = None
    kv_transfer_params: None = None


class AbortRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    request_ids: list[str]


class AbortReply(BaseModel):
    aborted: list[str]  # those that ran


class TokensAdapter(TextAdapter):
    """One request of token ids; ``running`` are those of its tenant in this process."""

    def __init__(
        self, service: OpenAIService, body: GenerateRequest, running: RunningRequests
    ) -> None:
        self._asked = body.completion(service.max_model_len)
        super().__init__(service, self._asked)
        self._id = body.request_id or self._cursor.request_id
        self._running = running
        self.ignored = sorted((body.model_extra or {}).keys() - LACKING.keys())
        self.ignored += self._asked.ignored_fields()
        self._as_text = body.output_mode == "text"
        self._shows_prompt = bool(body.return_token_ids)
        named = bool(self._asked.logprob_token_ids)
        self._scores = LogprobsWriter(service.tokenizer, self._asked.logprobs, True, named)

    def param_names(self) -> dict[str, str]:
        return {"prompt": IDS}

    def run(self, generation: Generation) -> Deltas:
        return self._running.run(self._id, generation)

    def reply(self, generation: Generation) -> str:
        prompt, scores, given = generation.prompts[0], None, self._asked.prompt_logprob_token_ids
        if (asked := self._asked.prompt_logprobs) is not None:
            scores = prompt_logprobs(prompt.ids, prompt.scores, asked, self._service.tokenizer)
        return GenerateReply(
            request_id=self._id,
            choices=[self._choice(choice, choice.whole) for choice in generation.choices],
            prompt_token_ids=prompt.ids if self._shows_prompt else None,
            prompt_logprobs=scores,
            prompt_token_id_logprobs=None
            if given is None
            else as_npy(given_scores(given, prompt.scores, len(prompt.ids))),
            usage=generation.usage(),
        ).model_dump_json()

    def events(self, choice: Choice, delta: TextDelta) -> list[str]:
        self._cursor.advance(choice, delta)
        if not (delta.text or delta.finish_reason or delta.token_ids):
            return []  # a part of the prompt is computed
        first = self._shows_prompt and choice.index not in self._started
        self._started.add(choice.index)
        chunk = GenerateReply(
            request_id=self._id,
            choices=[self._choice(choice, delta)],
            prompt_token_ids=choice.prompt.ids if first else None,
        )
        return [self._cursor.event(chunk.model_dump_json(), choice)]

    def _choice(self, choice: Choice, delta: TextDelta) -> TokenChoice:
        """What ``delta`` says; the choice itself may have got further already."""
        scored, masked = self._asked.logprobs is not None, self._asked.return_sampling_mask
        ids, entries = delta.token_ids, delta.logprobs
        return TokenChoice(
            index=choice.index,
            token_ids=None if self._as_text else ids,
            text=delta.text if self._as_text else None,
            logprobs=self._scores.chat(ids, entries) if scored else None,
            sampling_mask=sampling_mask(entries, self._asked.top_k or 0) if masked else None,
            kept_mass=kept_masses(entries) if scored or masked else None,
            weight_versions=self._versions(choice) if delta.finish_reason else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )


def abort(running: RunningRequests, service: OpenAIService, body: AbortRequest) -> str:
    """Ends a tenant's requests of this process by the ids that it gave; returns the reply.

    Raises:
        InvalidRequest: there are several ingresses, and others may have them.
    """
    if service.settings.get("ingress_replicas", 1) > 1:
        raise InvalidRequest(
            "abort_requests knows those of one HTTP replica, and this server has several: close a "
            "request's connection instead, which aborts it; /admin/drain stops an engine.",
            "request_ids",
        )
    return json.dumps({"aborted": running.abort(body.request_ids)})
