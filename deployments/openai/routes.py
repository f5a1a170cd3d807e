"""The OpenAI API as an ASGI application."""

import re
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from rayfin import __version__
from rayfin.actors.errors import ModelNotFound
from rayfin.deployments.edge.settings import add_edge
from rayfin.deployments.openai.bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationBody,
)
from rayfin.deployments.openai.chat import ChatHandler
from rayfin.deployments.openai.completions import CompletionHandler
from rayfin.deployments.openai.errors import add_error_handlers, invalid_request
from rayfin.deployments.openai.json_body import read_json
from rayfin.deployments.openai.replies import ModelCard, ModelList
from rayfin.deployments.openai.service import OpenAIService

IGNORED_FIELDS = "x-rayfin-ignored-fields"
FIELD_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")  # names that may stand in a header
MAX_NAMED = 16
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Body = TypeVar("Body", bound=GenerationBody)


def build_api(service: OpenAIService) -> FastAPI:
    """Every endpoint of one ingress. Bodies are read by the handlers, so there is no /docs."""
    app = FastAPI(
        title="Rayfin",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    add_error_handlers(app)
    add_edge(app, service.edge)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _read(request, CompletionRequest)
        return await CompletionHandler(service, body).answer(request, _headers(body))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await _read(request, ChatCompletionRequest)
        return await ChatHandler(service, body).answer(request, _headers(body))

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[_card(service, name) for name in service.model_names])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        if name not in service.model_names:
            raise ModelNotFound(f"The model `{name[:128]}` does not exist.", "model")
        return _card(service, name)

    @app.get("/health")
    async def health() -> Response:
        await service.client.check_health()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.client.metrics(), media_type=METRICS_TYPE)

    @app.get("/")
    async def root() -> Response:
        paths = sorted(path for route in app.routes if (path := getattr(route, "path", "/")) != "/")
        return JSONResponse({"name": "Rayfin", "version": __version__, "endpoints": paths})

    return app


async def _read(request: Request, kind: type[Body]) -> Body:
    try:
        return kind.model_validate(await read_json(request))
    except ValidationError as error:
        raise invalid_request(error.errors(include_input=False)) from None


def _headers(body: GenerationBody) -> dict[str, str]:
    """Names what was ignored; a name that is no plain word stands as a question mark."""
    names = body.ignored_fields()[:MAX_NAMED]
    shown = [name if FIELD_NAME.fullmatch(name) else "?" for name in names]
    return {IGNORED_FIELDS: ",".join(shown)} if shown else {}


def _card(service: OpenAIService, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.created,
        root=service.model_names[0],
        max_model_len=service.max_model_len,
    )
