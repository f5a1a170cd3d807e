"""Everything that one ingress answers, as an ASGI application."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware import Middleware

from rayfin import __version__
from rayfin.actors.metrics.render import merged
from rayfin.deployments.api.adapters import add_adapter_routes
from rayfin.deployments.api.admin import Operated, add_admin_routes
from rayfin.deployments.api.anthropic.bodies import MessagesRequest, PromptBody
from rayfin.deployments.api.anthropic.messages import MessagesAdapter, prompt_of
from rayfin.deployments.api.anthropic.replies import TokenCount
from rayfin.deployments.api.anthropic.tools import answer_rules, ignored_fields
from rayfin.deployments.api.audio.adapter import TranscriptionAdapter
from rayfin.deployments.api.audio.form import Task, read_form
from rayfin.deployments.api.audio.whisper import WhisperAdapter
from rayfin.deployments.api.models import add_model_routes
from rayfin.deployments.api.ollama.routes import add_ollama_routes
from rayfin.deployments.api.openai.bodies import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
)
from rayfin.deployments.api.openai.chat import ChatAdapter
from rayfin.deployments.api.openai.completions import TextAdapter
from rayfin.deployments.api.openai.decisions import (
    DecisionAdapter,
    DecisionRequest,
    SystemOneRequest,
)
from rayfin.deployments.api.openai.scoring import ScoringAdapter, ScoringRequest
from rayfin.deployments.api.openai.tokenize import add_tokenize_routes
from rayfin.deployments.api.openai.tokens import (
    AbortRequest,
    GenerateRequest,
    TokensAdapter,
    abort,
)
from rayfin.deployments.api.openapi import add_openapi
from rayfin.deployments.api.responses.routes import add_response_routes
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.api.web_page import add_web_routes
from rayfin.deployments.batches.folder import BatchFolder
from rayfin.deployments.batches.message_batches import add_message_batch_routes
from rayfin.deployments.batches.routes import add_batch_routes
from rayfin.deployments.edge.middleware import OperatorMiddleware, RootPath, add_own_routes
from rayfin.deployments.generation.route import GenerationRoute
from rayfin.deployments.generation.running import RunningRequests
from rayfin.deployments.generation.service import OpenAIService, ServedModels
from rayfin.deployments.http.anthropic_errors import AnthropicErrors
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.errors import add_error_handlers
from rayfin.deployments.http.idempotency import Idempotency
from rayfin.deployments.http.json_body import ignored_header, read_body, read_json, validate
from rayfin.deployments.http.layers import HttpSettings, arrange, settings_layers
from rayfin.deployments.pooling.routes import add_pooling_routes
from rayfin.deployments.telemetry.load import LoadCounter, RequestMeter

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def build_api(
    *services: OpenAIService,
    models: ServedModels | None = None,
    edge: HttpSettings | None = None,
    responses: ResponseStoreClient | None = None,
    batches: BatchFolder | None = None,
    outer: Mapping[str, Middleware | None] | None = None,
) -> FastAPI:
    """Builds every endpoint of one ingress, over one service for each model (``ServedModels``).

    The handlers read their bodies; ``add_openapi`` describes them.

    Args:
        models: in place of the services, where more may join.
        edge: in place of the services' own.
        responses: the stored responses; by default a store in this process.
        batches: the folder of files and batches; None: the routes answer that there is none.
    """
    models = models or ServedModels(services)
    service = models.first  # has what all share
    edge = edge or service.edge
    app = FastAPI(
        title="Rayfin",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=arrange("replica", _layers(service, edge) | dict(outer or {})),
    )
    add_error_handlers(app, log_stack=edge.log_error_stack)
    add_completion_routes(app, models)
    add_token_routes(app, models)
    add_response_routes(app, models, responses or ResponseStoreClient())
    add_message_routes(app, models)
    add_ollama_routes(app, models)
    add_model_routes(app, models)
    add_adapter_routes(app, models)
    add_tokenize_routes(app, models)
    add_pooling_routes(app, models)
    add_audio_routes(app, models)
    add_batch_routes(app, batches)
    add_message_batch_routes(app, batches, models.resolve_messages)
    add_status_routes(app, models)
    if edge.web:
        add_web_routes(app, models, batches)
    if edge.admin_keys is not None:
        managed = [operated(each) for each in models.services]
        models.joined = lambda late: managed.append(operated(late))
        add_admin_routes(app, managed)
    add_own_routes(app, edge.plugins)
    add_openapi(app, docs=edge.docs, root_path=edge.root_path)
    return app


def operated(service: OpenAIService) -> Operated:
    names, settings = service.model_names, service.settings
    return Operated(names, service.client, settings, service.weights)


def _layers(service: OpenAIService, edge: HttpSettings) -> dict[str, Middleware | None]:
    """The layers of a replica, by their names in LAYERS."""
    root, middleware = edge.root_path, edge.middleware
    return settings_layers(edge) | {
        "root_path": Middleware(RootPath, path=root) if root else None,
        "middleware": Middleware(OperatorMiddleware, paths=middleware) if middleware else None,
        "meter": Middleware(RequestMeter, counts=service.counts),
        "anthropic_errors": Middleware(AnthropicErrors),
        "idempotency": Middleware(Idempotency, answers=service.answers),
        "tracing": None if service.tracing is None else Middleware(service.tracing.layer),
        "load": Middleware(LoadCounter, load=service.load),
    }


def add_completion_routes(app: FastAPI, models: ServedModels) -> None:
    async def complete(request: Request, body: CompletionRequest) -> Response:
        headers = ignored_header(body.ignored_fields())
        service = await models.resolve_model(request, body.model)
        return await GenerationRoute(TextAdapter(service, body)).answer(request, headers)

    async def chat(request: Request, body: ChatCompletionRequest) -> Response:
        headers = ignored_header(body.ignored_fields())
        service = await models.resolve_model(request, body.model)
        return await GenerationRoute(ChatAdapter(service, body)).answer(request, headers)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await complete(request, await read_body(request, CompletionRequest))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await chat(request, await read_body(request, ChatCompletionRequest))

    @app.post("/v1/chat/completions/batch")
    async def chat_batch(request: Request) -> Response:
        return await chat(request, await read_body(request, BatchChatRequest))

    @app.post("/generative_scoring")
    async def generative_scoring(request: Request) -> Response:
        body = await read_body(request, ScoringRequest)
        service = await models.resolve_model(request, body.model)
        headers = ignored_header(list(body.model_extra or {}))
        return await GenerationRoute(ScoringAdapter(service, body)).answer(request, headers)

    async def decide(request: Request, kind: type[DecisionRequest | SystemOneRequest]) -> Response:
        body = await read_body(request, kind)
        service = await models.resolve_model(request, body.model)
        adapter = DecisionAdapter(service, body)
        return await GenerationRoute(adapter).answer(request, ignored_header(body.ignored_fields()))

    @app.post("/v1/decisions")
    async def decisions(request: Request) -> Response:
        return await decide(request, DecisionRequest)

    @app.post("/v1/systemone")
    async def system_one(request: Request) -> Response:
        return await decide(request, SystemOneRequest)

    @app.post("/invocations")
    async def invocations(request: Request) -> Response:
        """SageMaker's route for both kinds; a body with messages is a chat completion."""
        value = await read_json(request)
        if "messages" in value:
            return await chat(request, validate(value, ChatCompletionRequest))
        return await complete(request, validate(value, CompletionRequest))


def add_token_routes(app: FastAPI, models: ServedModels) -> None:
    # Of each tenant: ids are its own.
    running: defaultdict[str, RunningRequests] = defaultdict(RunningRequests)

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> Response:
        body = await read_body(request, GenerateRequest)
        service = await models.resolve_model(request, body.model)
        adapter = TokensAdapter(service, body, running[Caller.of(request).tenant])
        return await GenerationRoute(adapter).answer(request, ignored_header(adapter.ignored))

    @app.post("/inference/v1/abort_requests")
    async def abort_requests(request: Request) -> Response:
        body = await read_body(request, AbortRequest)
        theirs = running[Caller.of(request).tenant]
        return Response(abort(theirs, models.first, body), media_type="application/json")


def add_message_routes(app: FastAPI, models: ServedModels) -> None:
    @app.post("/v1/messages")
    async def create(request: Request) -> Response:
        body = await read_body(request, MessagesRequest)
        service = await models.resolve_messages(request, body.model)
        headers = ignored_header(ignored_fields(body, service))
        return await GenerationRoute(MessagesAdapter(service, body)).answer(request, headers)

    @app.post("/v1/messages/count_tokens")
    async def count(request: Request, response: Response) -> TokenCount:
        body = await read_body(request, PromptBody)
        service = await models.resolve_messages(request, body.model)
        response.headers.update(ignored_header(ignored_fields(body, service)))
        answer_rules(body)  # checks the fields that leave the prompt as it is
        prompt = await prompt_of(service, body, any_length=True)
        return TokenCount(input_tokens=len(prompt.chat.ids))


def add_audio_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds the routes of models that hear."""

    async def answer(request: Request, task: Task) -> Response:
        async def check(name: str | None) -> None:
            _, media = await models.resolve_hearing(request, name)
            media.room.check()

        if not models.max_upload_bytes:
            await check(None)  # which says what the first model does instead
        form = await read_form(request, task, models.max_upload_bytes, check)
        service, media = await models.resolve_hearing(request, form.model)
        kind = TranscriptionAdapter if media.speech is None else WhisperAdapter
        adapter = kind(service, media, form)
        del form  # with the file, which the adapter forgets once it is read
        return await GenerationRoute(adapter).answer(request, {})

    @app.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        return await answer(request, "transcribe")

    @app.post("/v1/audio/translations")
    async def translations(request: Request) -> Response:
        return await answer(request, "translate")


def add_status_routes(app: FastAPI, models: ServedModels) -> None:
    @app.get("/health")
    @app.get("/ping")  # SageMaker's name for it
    @app.post("/ping")
    async def health() -> Response:
        """Returns 200 if every model that has started is healthy."""
        for service in models.services:
            await service.client.check_health()
        return Response()

    @app.get("/live")
    async def live() -> Response:
        """Returns 200 if this process answers; the engines do not matter."""
        return Response()

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": models.first.load.in_flight}

    @app.get("/kv_event_sources")
    async def kv_event_sources() -> list[dict[str, Any]]:
        """Returns where the engines of all models send events of their pages."""
        reports = [each for model in models.services for each in await model.client.engines()]
        sources = [each.stats.kv_events for each in reports]
        return [asdict(source) for source in sources if source is not None]

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        texts = await asyncio.gather(*(service.client.metrics() for service in models.services))
        return Response(merged(texts), media_type=METRICS_TYPE)

    @app.head("/", include_in_schema=False)  # Claude Code's first question
    @app.get("/")
    async def root() -> Response:
        paths = {getattr(route, "path", "/") for route in app.routes} - {"/"}
        return JSONResponse({"name": "Rayfin", "version": __version__, "endpoints": sorted(paths)})
