"""Ollama's routes: chats, completions, embeddings, and what says which models there are."""

import hashlib
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from rayfin.actors.errors import InvalidRequest, ModelNotFound
from rayfin.deployments.api.ollama.adapter import OllamaAdapter, stamped
from rayfin.deployments.api.ollama.bodies import (
    OllamaBody,
    OllamaChat,
    OllamaEmbed,
    OllamaGenerate,
    OllamaName,
)
from rayfin.deployments.generation.route import GenerationRoute, while_connected
from rayfin.deployments.generation.service import OpenAIService, ServedModels
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import Body, ignored_header, read_body
from rayfin.deployments.pooling.bodies import InputBody
from rayfin.deployments.pooling.gather import pool
from rayfin.deployments.pooling.read import read_inputs
from rayfin.deployments.pooling.vectors import check_dimensions, cut

SPOKEN = "0.12.6"  # the version of Ollama whose API this is; clients want a lowest one
LATEST = ":latest"
AGES = timedelta(days=365)  # until a model is unloaded


def add_ollama_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds the routes. Their refusals are ``{"error": message}`` (``http/errors.py``)."""
    _add_list_routes(app, models)

    async def generate(request: Request, body: OllamaBody) -> Response:
        service = await models.resolve_model(request, _plain(models, body.model))
        if body.loads_only:  # all models are loaded
            message = {"message": {"role": "assistant", "content": ""}}
            said = message if isinstance(body, OllamaChat) else {"response": ""}
            return JSONResponse(stamped(body.model) | said | {"done": True, "done_reason": "load"})
        headers = ignored_header(body.ignored_fields())
        return await GenerationRoute(OllamaAdapter(service, body)).answer(request, headers)

    @app.post("/api/chat")
    async def chat(request: Request) -> Response:
        return await generate(request, await _read(request, OllamaChat))

    @app.post("/api/generate")
    async def complete(request: Request) -> Response:
        return await generate(request, await _read(request, OllamaGenerate))

    @app.post("/api/embed")
    async def embed(request: Request) -> Response:
        body = await _read(request, OllamaEmbed)
        return JSONResponse(await _embed(models, request, body))


async def _read(request: Request, kind: type[Body]) -> Body:
    """Reads a body of any type, as Ollama's documented calls by curl send a form's.

    A browser would let the page of another site send that, too, but names the page.
    """
    return await read_body(request, kind, any_type="origin" not in request.headers)


def _add_list_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds what says which models there are."""

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [_card(models.named(name), name) for name in _names(models)]}

    @app.get("/api/ps")
    async def ps() -> dict[str, Any]:
        expires = (datetime.now(UTC) + AGES).isoformat()
        loaded = []
        for name in _names(models):
            service = models.named(name)
            size = {"size_vram": 0, "context_length": service.max_model_len}
            loaded.append(_card(service, name) | {"expires_at": expires} | size)
        return {"models": loaded}

    @app.post("/api/show")
    async def show(request: Request) -> Response:
        body = await _read(request, OllamaName)
        if (name := _plain(models, body.model or body.name)) is None:
            raise ModelNotFound("The model is missing.", "model")
        await models.look_up(name)
        return JSONResponse(_shown(models.named(name)))

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": SPOKEN}


def _plain(models: ServedModels, name: str | None) -> str | None:
    """Returns a model's name without the tag that Ollama's clients add."""
    return name if name in models.names else (name or "").removesuffix(LATEST) or None


async def _embed(models: ServedModels, request: Request, body: OllamaEmbed) -> dict[str, Any]:
    began = time.monotonic()
    service, recipe = models.resolve_pooling(request, _plain(models, body.model), "embed")
    check_dimensions(recipe, body.dimensions, service.name)
    if body.input is None:
        raise InvalidRequest("input is missing.", "input", "missing_required_parameter")
    kept = None if body.truncate is False else -1
    inner = InputBody(input=body.input, truncate_prompt_tokens=kept)
    inputs, params = await read_inputs(service, recipe, inner)
    work = pool(service, inputs, params, Caller.of(request), request_id=uuid.uuid4().hex)
    pooled = await while_connected(request, work)
    dimensions = body.dimensions or recipe.cut
    vectors = [cut(vector, dimensions, normalize=True) for vector in pooled.vectors]
    return {
        "model": body.model,
        "embeddings": [vector.tolist() for vector in vectors],
        "total_duration": int((time.monotonic() - began) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": pooled.prompt_tokens,
    }


def _names(models: ServedModels) -> list[str]:
    """Returns the names of all models and adapters."""
    adapters = [ref.name for each in models.services for ref in models.adapters_of(each)]
    return [*models.names, *adapters]


def _card(service: OpenAIService, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "size": 0,
        "digest": hashlib.sha256(service.name.encode()).hexdigest(),
        "details": _details(),
    }


def _details() -> dict[str, Any]:
    empty = dict.fromkeys(("parent_model", "family", "parameter_size", "quantization_level"), "")
    return {**empty, "format": "rayfin", "families": []}


def _shown(service: OpenAIService) -> dict[str, Any]:
    template = service.chat_template or service.tokenizer.inner.chat_template
    can = ["embedding"] if service.recipe is not None else ["completion"]
    if service.recipe is None:
        formats = service.formats
        can += ["tools"] if formats.tools is not None else []
        can += ["thinking"] if formats.reasoning is not None else []
        can += ["vision"] if service.reads == "image" else []
    return {
        "modelfile": "",
        "parameters": "",
        "template": template if isinstance(template, str) else "",
        "details": _details(),
        "model_info": {
            "general.architecture": "rayfin",
            "rayfin.context_length": service.max_model_len,
        },
        "capabilities": can,
        "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
    }
