"""GET /v1/models, with vLLM's cards, and with Anthropic's for clients of Anthropic's."""

from datetime import UTC, datetime
from typing import Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel

from rayfin.deployments.api.anthropic.replies import ModelInfo, ModelPage
from rayfin.deployments.generation.service import OpenAIService, ServedModels
from rayfin.deployments.http.anthropic_errors import VERSION


class Permission(BaseModel):
    """A field of OpenAI's first API, which some clients still read."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int  # seconds since 1970
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: None = None
    is_blocking: bool = False


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "rayfin"
    root: str
    parent: str | None = None  # of an adapter: its model
    max_model_len: int
    permission: list[Permission]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def add_model_routes(app: FastAPI, models: ServedModels) -> None:
    @app.get("/v1/models")
    async def every(request: Request) -> ModelList | ModelPage:
        names = models.names
        if VERSION in request.headers:
            data = [_anthropic_card(models.named(name), name) for name in names]
            return ModelPage(data=data, first_id=names[0], last_id=names[-1])
        cards = [_card(models.named(name), name) for name in names]
        cards += [
            _adapter_card(service, name, path)
            for service in models.services
            for name, path in (await models.listed_adapters(service)).items()
        ]
        cards += [
            ModelCard(id=name, created=0, root=name, max_model_len=0, permission=[])
            for name in models.absent
        ]
        return ModelList(data=cards)

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> ModelCard | ModelInfo:
        await models.look_up(name)
        service = models.named(name)
        if VERSION in request.headers:
            return _anthropic_card(service, name)
        for base in models.services:
            for ref in models.adapters_of(base):
                if ref.name == service.name:
                    return _adapter_card(base, name, ref.path)
        return _card(service, name)


def _card(service: OpenAIService, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.created,
        root=service.name,
        max_model_len=service.max_model_len,
        permission=[Permission(id=f"modelperm-{name}", created=service.created)],
    )


def _adapter_card(service: OpenAIService, name: str, path: str) -> ModelCard:
    card = _card(service, name)
    card.root, card.parent = path, service.name
    return card


def _anthropic_card(service: OpenAIService, name: str) -> ModelInfo:
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=datetime.fromtimestamp(service.created, UTC).isoformat(),
        max_input_tokens=service.max_model_len,
        max_tokens=service.max_model_len,
    )
