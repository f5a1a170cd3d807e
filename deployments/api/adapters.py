"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM, and /admin/adapters."""

from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict
from starlette.responses import PlainTextResponse

from rayfin.actors.adapters.part import short
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.adapters.names import AdapterNames, card
from rayfin.deployments.generation.service import OpenAIService, ServedModels
from rayfin.deployments.http.auth import require_operator
from rayfin.deployments.http.json_body import ignored_header, read_body
from rayfin.deployments.http.paths import ADAPTER_LIST


class LoadLoraRequest(BaseModel):
    """The body of /v1/load_lora_adapter."""

    model_config = ConfigDict(extra="allow", strict=True)

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    model: str | None = None  # the base model, where several are served


class UnloadLoraRequest(BaseModel):
    """The body of /v1/unload_lora_adapter."""

    model_config = ConfigDict(extra="allow", strict=True)

    lora_name: str
    lora_int_id: int | None = None  # vLLM's, unused
    model: str | None = None


def add_adapter_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds the routes; they read files of the server, so that they want the operator's key, unless
    the settings let clients in."""
    open_to_clients = models.first.edge.client_adapters

    def check(request: Request) -> None:
        if not open_to_clients:
            require_operator(request)

    @app.post("/v1/load_lora_adapter")
    async def load(request: Request) -> Response:
        check(request)
        body = await read_body(request, LoadLoraRequest)
        service, adapters = _model_of(models, body.model)
        name = body.lora_name
        if name in models.names and name not in adapters.refs:
            raise InvalidRequest(f"{name[:128]!r} is the name of a model.", "lora_name")
        await adapters.load(name, body.lora_path, in_place=body.load_inplace)
        headers = ignored_header(list(body.model_extra or {}))
        text = f"Success: LoRA adapter '{name}' added successfully."
        return PlainTextResponse(text, headers=headers)

    @app.post("/v1/unload_lora_adapter")
    async def unload(request: Request) -> Response:
        check(request)
        body = await read_body(request, UnloadLoraRequest)
        _, adapters = _model_of(models, body.model)
        await adapters.unload(body.lora_name)
        headers = ignored_header(list(body.model_extra or {}))
        text = f"Success: LoRA adapter '{body.lora_name}' removed successfully."
        return PlainTextResponse(text, headers=headers)

    @app.get(ADAPTER_LIST)
    async def listed(request: Request) -> dict[str, Any]:
        require_operator(request)
        adapters: list[dict[str, Any]] = []
        for service in models.services:
            refs = list(models.adapters_of(service))
            held = await _holders(service) if refs else {}
            adapters += [
                {
                    "model": service.name,
                    **card(ref),
                    "engines": held.get(short(ref.digest), []),
                }
                for ref in refs
            ]
        return {"adapters": adapters}


async def _holders(service: OpenAIService) -> dict[str, list[str]]:
    """The engines whose runners hold an adapter, by its short digest."""
    holders: dict[str, list[str]] = {}
    for report in await service.client.engines():
        for digest in report.stats.adapters.resident:
            holders.setdefault(digest, []).append(report.engine)
    return holders


def _model_of(models: ServedModels, name: str | None) -> tuple[OpenAIService, AdapterNames]:
    """The base model of an adapter.

    Raises:
        ModelNotFound: there is no such model.
        InvalidRequest: it serves no adapters.
    """
    service = models.named(name)
    if service.adapters is None:
        raise InvalidRequest("This server has no adapters: it needs --enable-lora.", "model")
    return service, service.adapters
