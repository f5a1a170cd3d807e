"""GET /v1/models, with vLLM's cards."""

from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel

from rayfin.actors.errors import ModelNotFound
from rayfin.deployments.openai.service import OpenAIService


class Permission(BaseModel):
    """What OpenAI's first API said of a model; some clients still read it."""

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
    parent: None = None
    max_model_len: int
    permission: list[Permission]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def add_model_routes(app: FastAPI, service: OpenAIService) -> None:
    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[_card(service, name) for name in service.model_names])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        if name not in service.model_names:
            raise ModelNotFound(f"The model `{name[:128]}` does not exist.", "model")
        return _card(service, name)


def _card(service: OpenAIService, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.created,
        root=service.model_names[0],
        max_model_len=service.max_model_len,
        permission=[Permission(id=f"modelperm-{name}", created=service.created)],
    )
