"""Everything that one ingress answers, as an ASGI application."""

from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from starlette.middleware import Middleware

from rayfin import __version__
from rayfin.deployments.api.adapters import add_adapter_routes
from rayfin.deployments.api.admin.routes import Operated, add_admin_routes
from rayfin.deployments.api.anthropic.routes import add_message_routes
from rayfin.deployments.api.audio.routes import add_audio_routes
from rayfin.deployments.api.models import add_model_routes
from rayfin.deployments.api.openai.bodies import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
)
from rayfin.deployments.api.openai.chat import ChatAdapter
from rayfin.deployments.api.openai.completions import TextAdapter
from rayfin.deployments.api.openai.scoring import ScoringAdapter, ScoringRequest
from rayfin.deployments.api.openai.tokenize import add_tokenize_routes
from rayfin.deployments.api.openapi import add_openapi
from rayfin.deployments.api.responses.routes import add_response_routes
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.api.status import add_status_routes
from rayfin.deployments.api.web.routes import add_web_routes
from rayfin.deployments.batches.folder import BatchFolder
from rayfin.deployments.batches.routes import add_batch_routes
from rayfin.deployments.edge.middleware import OperatorMiddleware, RootPath
from rayfin.deployments.generation.route import GenerationRoute
from rayfin.deployments.generation.service import OpenAIService, ServedModels
from rayfin.deployments.http.anthropic_errors import AnthropicErrors
from rayfin.deployments.http.errors import add_error_handlers
from rayfin.deployments.http.idempotency import Idempotency
from rayfin.deployments.http.json_body import ignored_header, read_body, read_json, validate
from rayfin.deployments.http.layers import arrange, settings_layers
from rayfin.deployments.http.request_meter import RequestMeter
from rayfin.deployments.pooling.routes import add_pooling_routes
from rayfin.deployments.telemetry.load import LoadCounter


def build_api(
    *services: OpenAIService,
    responses: ResponseStoreClient | None = None,
    batches: BatchFolder | None = None,
    outer: Mapping[str, Middleware | None] | None = None,
) -> FastAPI:
    """Builds every endpoint of one ingress, over one service for each model (``ServedModels``).

    The handlers read their bodies; ``add_openapi`` describes them.

    Args:
        responses: the stored responses; by default a store in this process.
        batches: the folder of files and batches; None: the routes answer that there is none.
    """
    models = ServedModels(services)
    service = models.first  # has what all share
    app = FastAPI(
        title="Rayfin",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=arrange("replica", _layers(service) | dict(outer or {})),
    )
    add_error_handlers(app, log_stack=service.edge.log_error_stack)
    add_completion_routes(app, models)
    add_response_routes(app, models, responses or ResponseStoreClient())
    add_message_routes(app, models)
    add_model_routes(app, models)
    add_adapter_routes(app, models)
    add_tokenize_routes(app, models)
    add_pooling_routes(app, models)
    add_audio_routes(app, models)
    add_batch_routes(app, batches)
    add_status_routes(app, models)
    if service.edge.web:
        add_web_routes(app, models, batches)
    if service.edge.admin_keys is not None:
        add_admin_routes(app, [operated(each) for each in services])
    add_openapi(app, docs=service.edge.docs, root_path=service.edge.root_path)
    return app


def operated(service: OpenAIService) -> Operated:
    return Operated(service.model_names, service.client, service.settings)


def _layers(service: OpenAIService) -> dict[str, Middleware | None]:
    """The layers of a replica, by their names in LAYERS."""
    root, own = service.edge.root_path, service.edge.middleware
    return settings_layers(service.edge) | {
        "root_path": Middleware(RootPath, path=root) if root else None,
        "middleware": Middleware(OperatorMiddleware, paths=own) if own else None,
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

    @app.post("/invocations")
    async def invocations(request: Request) -> Response:
        """SageMaker's route for both kinds; a body with messages is a chat completion."""
        value = await read_json(request)
        if "messages" in value:
            return await chat(request, validate(value, ChatCompletionRequest))
        return await complete(request, validate(value, CompletionRequest))
