"""What chat and text completions have in common: sampling settings, resumable streams."""

import json
import logging
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.requests import Request

from rayfin.actors.errors import RayfinError
from rayfin.actors.messages import Receipt
from rayfin.actors.sampling_params import SamplingParams
from rayfin.actors.weights.spans import as_json
from rayfin.deployments.api.openai.bodies import ChatCompletionRequest, CompletionRequest
from rayfin.deployments.api.openai.chunks import ChunkFrame, member, usage_so_far
from rayfin.deployments.generation.beams import search_params, text_params
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import Generation
from rayfin.deployments.generation.plan import OutputPlan, plan_text
from rayfin.deployments.generation.resume import Cursor, digest_of
from rayfin.deployments.generation.route import GenerationAdapter
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.errors import error_body
from rayfin.deployments.http.json_body import rename_error_params
from rayfin.deployments.http.sse import DONE
from rayfin.deployments.text.output import TextDelta

logger = logging.getLogger("rayfin.http")


class CompletionAdapter(GenerationAdapter):
    """A request of either kind of completion.

    Args:
        prefix: of the request's id.
        kind: the ``object`` of a stream's chunks.
    """

    def __init__(
        self,
        service: OpenAIService,
        body: ChatCompletionRequest | CompletionRequest,
        prefix: str,
        kind: str,
    ) -> None:
        self._service = service
        self._settings = body
        self._prefix, self._kind = prefix, kind
        self._model = service.name
        self._created = int(time.time())
        self.streamed = bool(body.stream)
        self.stream_interval = body.stream_interval
        # The engine and event ids have the server's own id, whatever label a client gives.
        self._cursor = Cursor(f"{prefix}-{uuid.uuid4().hex}")
        self._id = f"{prefix}-{body.request_id}" if body.request_id else self._cursor.request_id
        forced = service.replies.force_usage
        self._includes_usage = forced or body.include_usage
        self._continuous_usage = forced or body.continuous_usage

    async def prepare(self, request: Request) -> Generation:
        body, service = self._settings, self._service
        with rename_error_params(self.param_names()):
            if self.streamed:
                self._cursor = Cursor.of(request, self._prefix, self._cursor)
            caller = Caller.of(request, body)
            search = search_params(body, body.token_limit()) if body.use_beam_search else None
            params = (
                body.sampling_params(service.sampling_defaults, body.token_limit())
                if search is None
                else text_params(body, search)
            )
            prompts = await self.prompts(params)
            self._generation = await Generation.prepare(
                service.with_weights(body.weight_version),
                prompts,
                params,
                request_id=self._cursor.request_id,
                priority=body.priority or 0,
                caller=caller,
                search=search,
                plan=await self.plan(caller),
            )
        return self._generation

    async def open(self, request: Request, generation: Generation) -> None:
        if not self.streamed:
            return
        receipt = await self._cursor.open(
            request,
            self._service.client,
            generation.choices,
            Receipt(self._id, self._created, await digest_of(request)),
            seeded=self._settings.seed is not None,
        )
        self._id, self._created = receipt.answer_id, receipt.created
        self._started = self._cursor.begun()  # choices that have had their first event
        self._frame = ChunkFrame(self._id, self._kind, self._created, self._model)

    @abstractmethod
    def param_names(self) -> dict[str, str]:
        """Returns names of sampling settings that errors replace, and the body's own names."""

    @abstractmethod
    async def prompts(self, params: SamplingParams) -> Sequence[Prompt]: ...

    async def plan(self, caller: Caller) -> OutputPlan:
        """Returns how the answers are guided and read; called after ``prompts``."""
        return await plan_text(self._service, self._settings.answer_rules(), caller.tenant)

    def is_new(self, choice: Choice, delta: TextDelta) -> bool:
        return self._cursor.is_new(choice, delta)

    def _usage_so_far(self, choice: Choice, details: str = "") -> str:
        """Returns the member ``usage`` of a chunk: its choice's tokens so far; "" if unwanted."""
        if not self._continuous_usage:
            return ""
        return usage_so_far(len(choice.prompt.ids), self._cursor.sent(choice), details)

    def _versions(self, choice: Choice) -> list[dict[str, Any]] | None:
        """Returns which weights have made which of a choice's tokens; None if unwanted."""
        asked = self._settings.return_weight_versions
        return as_json(choice.output.versions.spans) if asked else None

    def _with_versions(self, written: str, choice: Choice, delta: TextDelta) -> str:
        """Returns a choice of a chunk, with that if it is the last one."""
        if not (self._settings.return_weight_versions and delta.finish_reason):
            return written
        return f"{written[:-1]}{member('weight_versions', self._versions(choice))}}}"

    def _names_tokens_by_id(self) -> bool:
        asked = self._settings.return_tokens_as_token_ids
        return self._service.replies.tokens_as_ids if asked is None else asked

    def closing(self) -> Iterable[str]:
        if self._includes_usage:
            generation = self._generation
            chunk = self._frame.last(generation.usage(), generation.metrics())
            if (last := self._cursor.usage(chunk)) is not None:
                yield last
        yield DONE

    def failure(self, error: Exception) -> Iterable[str]:
        if not isinstance(error, RayfinError):
            logger.exception("A stream failed")
        yield f"data: {json.dumps(error_body(error))}\n\n"
        yield DONE
