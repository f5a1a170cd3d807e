"""Embeddings over HTTP: /v1/embeddings, /v2/embed, /classify and /pooling."""

import json
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request, Response

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import Float32Array
from rayfin.actors.model_files.pooling_recipe import PoolingTask
from rayfin.deployments.generation.generation import off_loop
from rayfin.deployments.generation.route import while_connected
from rayfin.deployments.generation.service import ServedModels
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import ignored_header, read_body
from rayfin.deployments.pooling.bodies import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    InputBody,
    PoolingBody,
    PoolingRequest,
)
from rayfin.deployments.pooling.gather import Pooled, pool
from rayfin.deployments.pooling.read import read_inputs
from rayfin.deployments.pooling.scores import add_score_routes
from rayfin.deployments.pooling.vectors import (
    activated,
    base64_text,
    check_dimensions,
    cut,
)

FLOAT_CHARACTERS = 20
COHERE_PROMPTS = {"search_query": ("query",), "search_document": ("document", "passage")}


def add_pooling_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds the routes of models that pool."""

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await read_body(request, EmbeddingRequest)
        return await _Route(models, request, body, "embed").embeddings(body)

    @app.post("/v2/embed")
    async def cohere_embed(request: Request) -> Response:
        body = await read_body(request, CohereEmbedRequest)
        return await _Route(models, request, body, "embed").cohere(body)

    @app.post("/classify")
    async def classify(request: Request) -> Response:
        body = await read_body(request, ClassificationRequest)
        return await _Route(models, request, body, "classify").classify(body)

    @app.post("/pooling")
    async def pooling(request: Request) -> Response:
        body = await read_body(request, PoolingRequest)
        return await _Route(models, request, body, "").pooling(body)

    add_score_routes(app, models)


class _Route:
    """One request to a pooling route."""

    def __init__(
        self,
        models: ServedModels,
        request: Request,
        body: PoolingBody,
        kind: Literal["embed", "classify", ""],
    ) -> None:
        self._service, self._recipe = models.resolve_pooling(request, body.model, kind)
        self._request = request
        self._caller = Caller.of(request)
        self._id = uuid.uuid4().hex  # the server's own, whatever label a client gives
        body.check()
        self._headers = ignored_header(body.ignored_fields())

    async def embeddings(self, body: EmbeddingRequest) -> Response:
        self._check_dimensions(body.dimensions)
        pooled = await self._pooled(body)
        vectors = self._cut(pooled.vectors, body.dimensions)
        return await self._listed("embd", "embedding", "embedding", vectors, pooled, body)

    async def pooling(self, body: PoolingRequest) -> Response:
        task = body.task
        if task in ("embed", "classify") and task != self._recipe.kind:
            raise InvalidRequest(f"This model is for {self._recipe.kind}, not {task}.", "task")
        self._check_dimensions(body.dimensions)
        pooled = await self._pooled(body, task)
        vectors = pooled.vectors
        if (task or self._recipe.kind) == "embed":
            vectors = self._cut(vectors, body.dimensions)
        elif self._recipe.kind == "classify" and task != "token_embed":
            vectors = [
                activated(vector, self._activation(body.use_activation)) for vector in vectors
            ]
        return await self._listed("pool", "pooling", "data", vectors, pooled, body)

    async def classify(self, body: ClassificationRequest) -> Response:
        pooled = await self._pooled(body)
        activation = self._activation(body.use_activation)
        data = []
        for index, logits in enumerate(pooled.vectors):
            probs = activated(logits, activation)
            label = self._recipe.labels[int(probs.argmax())]
            one = {"index": index, "label": label, "probs": probs.tolist()}
            data.append(one | {"num_classes": len(probs)})
        return self._answer(self._envelope("classify", data, pooled), pooled)

    async def cohere(self, body: CohereEmbedRequest) -> Response:
        if wrong := set(body.embedding_types or ()) - {"float"}:
            raise InvalidRequest(
                f"embedding_types may be 'float' only, got {min(wrong)[:32]!r}.", "embedding_types"
            )
        self._check_dimensions(body.output_dimension, "output_dimension")
        inner = InputBody(
            input=_cohere_texts(body),
            truncate_prompt_tokens=None if body.truncate == "NONE" else body.max_tokens or -1,
            truncation_side="left" if body.truncate == "START" else "right",
            priority=body.priority,
            prompt_name=self._cohere_prompt(body.input_type),
        )
        param = "texts" if body.texts is not None else "inputs"
        pooled = await self._pooled(inner, param=param)
        vectors = self._cut(pooled.vectors, body.output_dimension)
        answer = {
            "id": f"embd-{self._id}",
            "embeddings": {"float": [vector.tolist() for vector in vectors]},
            "texts": inner.input,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": pooled.prompt_tokens},
            },
            "response_type": "embeddings_by_type",
        }
        return self._answer(answer, pooled)

    def _cohere_prompt(self, kind: str | None) -> str | None:
        names = dict(self._recipe.prompts)
        wanted = (kind or "", *COHERE_PROMPTS.get(kind or "", ()))
        return next((name for name in wanted if name in names), None)

    def _activation(self, use: bool | None) -> Any:
        return "identity" if use is False else self._recipe.class_activation

    def _check_dimensions(self, dimensions: int | None, param: str = "dimensions") -> None:
        try:
            check_dimensions(self._recipe, dimensions, self._service.name)
        except InvalidRequest as error:
            error.param = param
            raise

    def _cut(self, vectors: Sequence[Float32Array], dimensions: int | None) -> list[Float32Array]:
        dimensions = dimensions or self._recipe.cut
        return [cut(vector, dimensions, normalize=self._recipe.normalize) for vector in vectors]

    async def _pooled(
        self, body: InputBody, task: PoolingTask | None = None, param: str = "input"
    ) -> Pooled:
        inputs, params = await read_inputs(self._service, self._recipe, body, param)
        work = pool(
            *(self._service, inputs, params, self._caller),
            request_id=self._id,
            task=task,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )
        return await while_connected(self._request, work)

    async def _listed(
        self,
        prefix: str,
        kind: str,
        name: str,
        vectors: Sequence[Float32Array],
        pooled: Pooled,
        body: InputBody,
    ) -> Response:
        def written() -> Response:
            in_base64 = body.encoding_format == "base64"
            data = [
                {
                    "object": kind,
                    "index": index,
                    name: base64_text(vector) if in_base64 else vector.tolist(),
                }
                for index, vector in enumerate(vectors)
            ]
            return self._answer(self._envelope(prefix, data, pooled), pooled)

        numbers = sum(vector.size for vector in vectors)
        return await off_loop(numbers * FLOAT_CHARACTERS, partial(written))

    def _envelope(self, prefix: str, data: list[dict[str, Any]], pooled: Pooled) -> dict[str, Any]:
        tokens = pooled.prompt_tokens
        return {
            "id": f"{prefix}-{self._id}",
            "object": "list",
            "created": int(time.time()),
            "model": self._service.name,
            "data": data,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }

    def _answer(self, answer: dict[str, Any], pooled: Pooled) -> Response:
        headers = self._headers | pooled.headers
        return Response(json.dumps(answer), 200, headers, "application/json")


def _cohere_texts(body: CohereEmbedRequest) -> list[str]:
    if body.texts is not None:
        texts = body.texts
    else:
        parts = [part for entry in body.inputs or () for part in entry.get("content", ())]
        texts = [part.get("text") for part in parts]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("texts must be a list of strings.", "texts", "invalid_type")
    return texts
