"""Scores over HTTP: /score and /rerank."""

import json
import time
import uuid
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.generation.generation import off_loop
from rayfin.deployments.generation.route import while_connected
from rayfin.deployments.generation.service import ServedModels
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import ignored_header, read_body
from rayfin.deployments.pooling.bodies import PairBody, RerankRequest, ScoreRequest
from rayfin.deployments.pooling.gather import Pooled, pool
from rayfin.deployments.pooling.inputs import MAX_INPUTS
from rayfin.deployments.pooling.pairs import Pair, PairSettings, make_pairs, prepare_pairs, ranked

PAIRED = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"))
PAIRS = (*PAIRED, ("data_1", "data_2"))


def add_score_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds /score and /rerank under all their paths."""

    @app.post("/score")
    @app.post("/v1/score")
    async def score(request: Request) -> Response:
        body = await read_body(request, ScoreRequest)
        pairs = _read_pairs(body)
        scores, pooled, headers = await _scores(models, request, body, pairs)
        data = [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(scores)
        ]
        answer = {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": models.named(body.model).name,
            "data": data,
            "usage": _usage(pooled),
        }
        return Response(json.dumps(answer), 200, headers, "application/json")

    @app.post("/rerank")
    @app.post("/v1/rerank")
    @app.post("/v2/rerank")
    async def rerank(request: Request) -> Response:
        body = await read_body(request, RerankRequest)
        if (body.top_n or 0) < 0:
            raise InvalidRequest(
                f"top_n must be at least 0, got {body.top_n}.", "top_n", "integer_below_min_value"
            )
        documents = _texts(body.documents, "documents")
        if not isinstance(body.query, str):
            raise InvalidRequest("'query' must be a text.", "query", "invalid_type")
        pairs = make_pairs([body.query], documents, "query", "documents")
        scores, pooled, headers = await _scores(models, request, body, pairs)
        results = []
        for index in ranked(scores, body.top_n):
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": documents[index]}
            results.append(result)
        answer = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": models.named(body.model).name,
            "usage": _usage(pooled),
            "results": results,
        }
        return Response(json.dumps(answer), 200, headers, "application/json")


async def _scores(
    models: ServedModels, request: Request, body: PairBody, pairs: list[Pair]
) -> tuple[list[float], Pooled, dict[str, str]]:
    service, recipe = models.resolve_pooling(request, body.model, "score")
    caller = Caller.of(request)
    body.check()
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        if (value := getattr(body, name)) is not None and value < 0:
            raise InvalidRequest(
                f"{name} must be at least 0, got {value}.", name, "integer_below_min_value"
            )
    settings = PairSettings(
        body.cut.limit(service.max_model_len),
        body.max_tokens_per_query or None,
        body.max_tokens_per_doc or None,
        body.instruction,
        body.use_activation is False,
    )
    characters = sum(len(pair.first) + len(pair.second) for pair in pairs)
    scored = await off_loop(
        characters, partial(prepare_pairs, service.tokenizer, recipe, pairs, settings)
    )
    work = pool(
        *(service, scored.inputs, scored.paths, caller),
        request_id=uuid.uuid4().hex,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
    )
    pooled = await while_connected(request, work)
    headers = ignored_header(body.ignored_fields()) | pooled.headers
    return scored.scores(pooled.vectors), pooled, headers


def _read_pairs(body: ScoreRequest) -> list[Pair]:
    """The pairs, under the names that the body gives them."""
    for first, second in PAIRS:
        one, other = getattr(body, first), getattr(body, second)
        if one is not None and other is not None:
            return make_pairs(_texts(one, first), _texts(other, second), first, second)
    raise InvalidRequest(
        "Missing required parameters: 'text_1' and 'text_2', or 'queries' and 'documents'.",
        "text_1" if body.text_1 is None else "text_2",
        "missing_required_parameter",
    )


def _texts(value: Any, name: str) -> list[str]:
    """A text or a list of texts, each a string or an object with ``text``."""
    listed = value if isinstance(value, list) else [value]
    texts: list[Any] = [entry.get("text") if isinstance(entry, dict) else entry for entry in listed]
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            path = f"{name}[{place}]" if isinstance(value, list) else name
            raise InvalidRequest(f"'{path}' must be a text.", path, "invalid_type")
    if len(texts) > MAX_INPUTS:
        raise InvalidRequest(
            f"'{name}' takes at most {MAX_INPUTS} texts, got {len(texts)}.",
            name,
            "array_above_max_length",
        )
    return texts


def _usage(pooled: Pooled) -> dict[str, int]:
    tokens = pooled.prompt_tokens
    return {"prompt_tokens": tokens, "total_tokens": tokens}
