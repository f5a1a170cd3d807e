"""The OpenAPI document: FastAPI knows the routes, this adds bodies and errors.

Handlers read their bodies, so that every error has one form; FastAPI sees no bodies.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel

from rayfin.deployments.api.anthropic.bodies import MessagesRequest, PromptBody
from rayfin.deployments.api.anthropic.replies import AnthropicMessage as AnthropicMessage
from rayfin.deployments.api.audio.form import SPEECH
from rayfin.deployments.api.audio.replies import Transcript
from rayfin.deployments.api.ollama.adapter import LINES
from rayfin.deployments.api.ollama.bodies import (
    OllamaChat,
    OllamaEmbed,
    OllamaGenerate,
    OllamaName,
)
from rayfin.deployments.api.openai.bodies import (
    BatchChatRequest,
    ChatCompletionRequest,
    CompletionRequest,
)
from rayfin.deployments.api.openai.decisions import DecisionRequest, SystemOneRequest
from rayfin.deployments.api.openai.replies import ChatCompletion, Completion
from rayfin.deployments.api.openai.scoring import Scores, ScoringRequest
from rayfin.deployments.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from rayfin.deployments.api.openai.tokens import (
    AbortReply,
    AbortRequest,
    GenerateReply,
    GenerateRequest,
)
from rayfin.deployments.api.responses.bodies import ResponsePromptBody, ResponseRequest
from rayfin.deployments.api.responses.compact import CompactedResponse
from rayfin.deployments.api.responses.replies import Response
from rayfin.deployments.batches.message_batches import BATCHES, MAX_PAGE, MessageBatchRequest
from rayfin.deployments.batches.routes import MAX_BATCHES_PAGE, MAX_FILES_PAGE, BatchRequest
from rayfin.deployments.batches.schemas import (
    AFTER,
    NEAR,
    ORDER,
    PURPOSE,
    UPLOAD,
    BatchList,
    BatchObject,
    FileList,
    FileObject,
    limit,
)
from rayfin.deployments.pooling.bodies import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from rayfin.deployments.pooling.replies import (
    ClassificationReply,
    CohereEmbedReply,
    EmbeddingReply,
    PoolingReply,
    RerankReply,
    ScoreReply,
)

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/chat/completions/batch": BatchChatRequest,
    "/generative_scoring": ScoringRequest,
    "/inference/v1/generate": GenerateRequest,
    "/inference/v1/abort_requests": AbortRequest,
    "/v1/decisions": DecisionRequest,
    "/v1/systemone": SystemOneRequest,
    "/invocations": CompletionRequest,  # or a ChatCompletionRequest, which has messages
    "/v1/responses": ResponseRequest,
    "/v1/responses/compact": ResponseRequest,
    "/v1/responses/input_tokens": ResponsePromptBody,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": PromptBody,
    "/api/chat": OllamaChat,
    "/api/generate": OllamaGenerate,
    "/api/embed": OllamaEmbed,
    "/api/show": OllamaName,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v2/embed": CohereEmbedRequest,
    "/classify": ClassificationRequest,
    "/pooling": PoolingRequest,
    "/score": ScoreRequest,
    "/v1/score": ScoreRequest,
    "/rerank": RerankRequest,
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/v1/batches": BatchRequest,
    "/v1/messages/batches": MessageBatchRequest,
}
REPLIES: dict[str, type[BaseModel]] = {  # of handlers that write their reply
    "POST /v1/completions": Completion,
    "POST /v1/chat/completions": ChatCompletion,
    "POST /v1/chat/completions/batch": ChatCompletion,
    "POST /generative_scoring": Scores,
    "POST /inference/v1/generate": GenerateReply,
    "POST /inference/v1/abort_requests": AbortReply,
    "POST /v1/audio/transcriptions": Transcript,
    "POST /v1/audio/translations": Transcript,
    "POST /v1/responses": Response,
    "POST /v1/responses/compact": CompactedResponse,
    "POST /v1/messages": AnthropicMessage,
    "POST /v1/embeddings": EmbeddingReply,
    "POST /v2/embed": CohereEmbedReply,
    "POST /classify": ClassificationReply,
    "POST /pooling": PoolingReply,
    "POST /score": ScoreReply,
    "POST /v1/score": ScoreReply,
    "POST /rerank": RerankReply,
    "POST /v1/rerank": RerankReply,
    "POST /v2/rerank": RerankReply,
    "POST /v1/files": FileObject,
    "GET /v1/files": FileList,
    "GET /v1/files/{file_id}": FileObject,
    "POST /v1/batches": BatchObject,
    "GET /v1/batches": BatchList,
    "GET /v1/batches/{batch_id}": BatchObject,
    "POST /v1/batches/{batch_id}/cancel": BatchObject,
}
FORMS: dict[str, dict[str, Any]] = {
    "/v1/files": UPLOAD,
    "/v1/audio/transcriptions": SPEECH,
    "/v1/audio/translations": SPEECH,
}
QUERIES: dict[str, list[dict[str, Any]]] = {  # parameters, which handlers read
    "GET /v1/files": [limit(MAX_FILES_PAGE), AFTER, ORDER, PURPOSE],
    "GET /v1/batches": [limit(MAX_BATCHES_PAGE), AFTER],
    "GET /v1/messages/batches": [limit(MAX_PAGE), *NEAR],
}
STREAMED = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/invocations"),
    *("/v1/audio", "/inference/v1/generate"),
)
NEVER_STREAMED = (
    *("/v1/messages/count_tokens", "/v1/chat/completions/batch", "/v1/responses/compact"),
    *(BATCHES, f"{BATCHES}/{{batch_id}}", f"{BATCHES}/{{batch_id}}/cancel"),
)
BODILESS = ("/health", "/live", "/ping")
TEXTS = ("/metrics",)
BINARY = ("/v1/files/{file_id}/content", f"{BATCHES}/{{batch_id}}/results")
FAILURES = {
    400: "The request is wrong; param and code say where and how.",
    401: "There is no API key, or a wrong one.",
    403: "The key's tenant may not ask for this.",
    404: "There is no such model, object or address.",
    405: "The address does not answer this method; Allow names those that it does.",
    408: "The body, or the answer, took too long.",
    409: "The Idempotency-Key came with another request before.",
    413: "The body is too large.",
    414: "The URL is too long.",
    415: "The body is not JSON in UTF-8, or compressed.",
    429: "The queue is full, or a quota used up; Retry-After says when to come back.",
    431: "The headers are too large.",
    499: "The client left.",
    500: "The server failed on this request.",
    503: "No engine can take the request now; Retry-After says when to come back.",
}
TEXT = {"type": "string"}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": TEXT, "content": {"anyOf": [TEXT, {"type": "array"}]}},
    },
}
NEEDED: dict[str, dict[str, Any]] = {  # required fields, which handlers check
    "/v1/completions": {
        "prompt": {"anyOf": [TEXT, IDS, *({"type": "array", "items": i} for i in (TEXT, IDS))]}
    },
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions/batch": {"messages": {"type": "array", "minItems": 1, "items": MESSAGES}},
    "/generative_scoring": {
        "query": {"anyOf": [TEXT, IDS]},
        "items": {"type": "array", "minItems": 1, "items": {"anyOf": [TEXT, IDS]}},
        "label_token_ids": IDS,
    },
    "/inference/v1/generate": {"token_ids": IDS},
    "/invocations": {"prompt": {"anyOf": [TEXT, IDS]}},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
}
STORES = (
    *("POST /v1/files", "POST /v1/batches", "POST /v1/batches/{batch_id}/cancel"),
    *(f"POST {BATCHES}", f"POST {BATCHES}/{{batch_id}}/cancel"),
)
STORAGE_FULL = "The disk of files and batches is full."
OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": TEXT}}
TEXT_OR_NULL = {"type": ["string", "null"]}
OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": TEXT_OR_NULL,
                "code": TEXT_OR_NULL,
            },
        }
    },
}
ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "request_id": TEXT_OR_NULL,
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
ERROR = {"anyOf": [OPENAI_ERROR, ANTHROPIC_ERROR]}  # Anthropic's on its routes and for its clients


def add_openapi(app: FastAPI, *, docs: bool, root_path: str = "") -> None:
    """Adds /openapi.json, and with ``docs`` /docs, a page that loads its scripts from a CDN."""

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> JSONResponse:
        servers = {"servers": [{"url": root_path}]} if root_path else {}
        return JSONResponse(description(app) | servers)

    if docs:

        @app.get("/docs", include_in_schema=False)
        async def page() -> HTMLResponse:
            return get_swagger_ui_html(openapi_url="openapi.json", title=app.title)


def description(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI 3.1 document of ``app``."""
    document = get_openapi(title=app.title, version=app.version, description="", routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = ERROR
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _describe(operation, path, method, schemas)
    return document


def _describe(operation: dict[str, Any], path: str, method: str, schemas: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    name = f"{method.upper()} {path}"
    if method == "post" and path in BODIES:
        body = {"schema": _reference(BODIES[path], schemas, NEEDED.get(path))}
        operation["requestBody"] = {"required": True, "content": {"application/json": body}}
    elif method == "post" and path in FORMS:
        form = {"multipart/form-data": {"schema": FORMS[path]}}
        operation["requestBody"] = {"required": True, "content": form}
    if name in QUERIES:
        operation["parameters"] = [*operation.get("parameters", ()), *QUERIES[name]]
    answer = responses["200"]
    if path in BODILESS:
        answer.pop("content", None)
    elif path in TEXTS:
        answer["content"] = {"text/plain": {"schema": {"type": "string"}}}
    elif path in BINARY:
        binary = {"type": "string", "format": "binary"}
        answer["content"] = {"application/octet-stream": {"schema": binary}}
    elif name in REPLIES:
        answer["content"] = {"application/json": {"schema": _reference(REPLIES[name], schemas)}}
    if path.startswith(STREAMED) and path not in (*NEVER_STREAMED, *BINARY):
        events = {"schema": {"type": "string"}}
        answer.setdefault("content", {})["text/event-stream"] = events
    error: dict[str, Any] = {"$ref": "#/components/schemas/Error"}
    if path.startswith("/api/"):
        answer.setdefault("content", {})[LINES] = {"schema": {"type": "string"}}
        error = {"anyOf": [error, OLLAMA_ERROR]}  # the layers before it have the first form
    failure = {"application/json": {"schema": error}}
    full = {507: STORAGE_FULL} if name in STORES else {}
    for status, reason in {**FAILURES, **full}.items():
        responses[str(status)] = {"description": reason, "content": failure}


def _reference(
    model: type[BaseModel], schemas: dict[str, Any], needed: dict[str, Any] | None = None
) -> dict[str, str]:
    """A reference to the model's schema, which it adds with all that it refers to."""
    name = f"{model.__module__.split('.')[-2]}_{model.__name__}"  # two APIs have a Message
    template = f"#/components/schemas/{name}_{{model}}"
    schema = model.model_json_schema(ref_template=template)
    for inner, definition in schema.pop("$defs", {}).items():
        schemas[f"{name}_{inner}"] = definition
    if needed:
        schema["properties"] |= needed
        schema["required"] = sorted({*schema.get("required", ()), *needed})
    schemas[name] = schema
    return {"$ref": f"#/components/schemas/{name}"}
