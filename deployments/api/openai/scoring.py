"""POST /generative_scoring: how likely certain tokens come next, as in vLLM.

Each item is a prompt of its own together with the query. Its score is the probability that the
first of the label tokens comes next: among the labels, or among all tokens.
"""

import math
import time
import uuid
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import TokenLogprob
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import Generation
from rayfin.deployments.generation.limits import MAX_CHOICES, PRIORITIES
from rayfin.deployments.generation.prompt_forms import WrittenPrompt, check_salt, read_prompts
from rayfin.deployments.generation.prompts import written_ids
from rayfin.deployments.generation.route import GenerationAdapter
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.generation.usage import Usage
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import rename_error_params
from rayfin.deployments.http.request_id import LABEL
from rayfin.deployments.text.checks import as_list, missing
from rayfin.deployments.text.output import TextDelta

LABELS = "label_token_ids"
NAMES = {"logprob_token_ids": LABELS}  # of sampling settings, for errors


class ScoringRequest(BaseModel):
    """A query, a text or token ids, and items of one of both kinds."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    query: Any = None
    items: Any = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None  # True: among the labels
    item_first: bool | None = None
    add_special_tokens: bool | None = None  # to the query; items have none
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None

    def check(self) -> None:
        """Raises:
        InvalidRequest: a field is missing, empty or out of range.
        """
        for name in ("query", "items", LABELS):
            if getattr(self, name) is None:
                raise missing(name)
        if not self.label_token_ids:
            raise InvalidRequest(f"{LABELS} must hold at least one token id.", LABELS)
        if self.cache_salt is not None:
            check_salt(self.cache_salt)
        if self.priority is not None and self.priority not in PRIORITIES:
            raise InvalidRequest("priority must fit 32 bits.", "priority")
        if self.request_id is not None and not LABEL.fullmatch(self.request_id):
            raise InvalidRequest(
                "request_id must be 1 to 128 of the characters A-Z a-z 0-9 . _ -", "request_id"
            )

    def parts(self, limit: int) -> tuple[WrittenPrompt, list[WrittenPrompt]]:
        """Returns the query and the items, at most so many.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong, such as items[1].
        """
        (query, *more) = read_prompts(self.query, "query")
        if more or isinstance(self.query, dict):
            raise InvalidRequest("query must be a text or token ids.", "query", "invalid_type")
        items = as_list(self.items, "items", MAX_CHOICES)
        for i, item in enumerate(items):
            if not isinstance(item, str | list):
                raise InvalidRequest(
                    f"'items[{i}]' must be a text or token ids.", f"items[{i}]", "invalid_type"
                )
        return query, read_prompts(items, "items", max_prompts=limit)


class Score(BaseModel):
    index: int  # of the item
    object: Literal["score"] = "score"
    score: float  # 0 to 1


class Scores(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int  # seconds since 1970
    model: str
    data: list[Score]
    usage: Usage


class ScoringAdapter(GenerationAdapter):
    """One request for scores: an engine request of one token for each item."""

    streamed = False

    def __init__(self, service: OpenAIService, body: ScoringRequest) -> None:
        self._service = service
        self._body = body
        self._model = service.name
        self._id = f"generative-scoring-{body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())

    async def prepare(self, request: Request) -> Generation:
        body, service = self._body, self._service
        body.check()
        with rename_error_params(NAMES):
            params = SamplingParams(
                max_tokens=1,
                logprob_token_ids=body.label_token_ids,
                logprobs_mode="raw_logprobs",
            )
        query, items = body.parts(service.replies.max_prompts)
        special = body.add_special_tokens is not False
        asked = await written_ids(service, query, add_special_tokens=special)
        prompts = [await self._prompt(asked, item) for item in items]
        with rename_error_params(NAMES):
            return await Generation.prepare(
                service,
                prompts,
                params,
                request_id=f"score-{uuid.uuid4().hex}",
                priority=body.priority or 0,
                caller=Caller.of(request),
            )

    async def _prompt(self, query: list[int], item: WrittenPrompt) -> Prompt:
        ids = await written_ids(self._service, item, add_special_tokens=False)
        whole = ids + query if self._body.item_first else query + ids
        # As in vLLM, what does not fit is cut off at the end.
        kept = whole[: self._service.max_model_len - 1]
        return Prompt(kept, item.param, cache_salt=self._body.cache_salt)

    def reply(self, generation: Generation) -> str:
        return Scores(
            id=self._id,
            created=self._created,
            model=self._model,
            data=[
                Score(index=choice.index, score=self._score(choice.logprobs[0]))
                for choice in generation.choices
            ],
            usage=generation.usage(),
        ).model_dump_json()

    def _score(self, token: TokenLogprob) -> float:
        labels = dict(token.top)
        first = math.exp(labels[(self._body.label_token_ids or [])[0]])
        if self._body.apply_softmax is False:
            return first
        total = math.fsum(map(math.exp, labels.values()))
        return first / total if total else 1 / len(labels)

    def events(self, choice: Choice, delta: TextDelta) -> Iterable[str]:
        raise NotImplementedError("scores are not streamed")

    def failure(self, error: Exception) -> Iterable[str]:
        raise NotImplementedError("scores are not streamed")
