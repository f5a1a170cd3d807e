"""The operators' routes; they are disabled without an admin key."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from rayfin import __version__
from rayfin.actors.errors import InvalidRequest, ModelNotFound
from rayfin.actors.messages import Command
from rayfin.actors.parts import RequestPart
from rayfin.actors.profile import DEFAULT_STEPS, MAX_STEPS, ProfileOrder
from rayfin.deployments.api.weights import add_weight_routes
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.client.weights import WeightsClient, sleep_command
from rayfin.deployments.http.auth import require_operator
from rayfin.deployments.http.json_body import read_body

logger = logging.getLogger("rayfin.admin")

Answer = dict[str, Any]
Operator = Annotated[str, Depends(require_operator)]

Tags = Annotated[list[str], Query(description="weights, kv_cache; all without")]
TAGS = {"weights", "kv_cache"}


class Engines(Protocol):
    """The part of ``EngineClient`` that operators use."""

    async def engines(self) -> list[EngineReport]: ...

    async def manage(self, command: Command, engine: str | None) -> list[EngineReport]: ...

    async def prepare(self, part: RequestPart) -> None: ...


@dataclass(frozen=True, slots=True)
class Operated:
    """A model that operators manage."""

    names: Sequence[str]
    client: Engines
    settings: Mapping[str, Any] = field(default_factory=dict)  # for /server_info
    weights: WeightsClient | None = None


ModelName = Annotated[str | None, Query(description="whose engines; all without")]


class ProfileRequest(BaseModel):
    """The body of /start_profile, which may be empty."""

    model_config = ConfigDict(extra="forbid", strict=True)

    profile_prefix: str = Field(default="", pattern=r"^[\w.-]{0,64}$")
    delay_iterations: int = Field(default=0, ge=0)
    max_iterations: int = Field(default=DEFAULT_STEPS, ge=1, le=MAX_STEPS)


def add_profile_routes(
    router: APIRouter, engines: Callable[[str | None], Sequence[Engines]]
) -> None:
    """Adds vLLM's routes for a profile of steps into --profile-dir to those of operators.

    Args:
        engines: finds those of a model, or all.
    """

    async def order(what: ProfileOrder, model: str | None) -> Response:
        for client in engines(model):
            await client.prepare(what)
        return Response()

    @router.post("/start_profile")
    async def start_profile(request: Request, model: ModelName = None) -> Response:
        body = ProfileRequest()
        if await request.body():
            body = await read_body(request, ProfileRequest)
        begin = ProfileOrder(False, body.profile_prefix, body.delay_iterations, body.max_iterations)
        return await order(begin, model)

    @router.post("/stop_profile")
    async def stop_profile(model: ModelName = None) -> Response:
        return await order(ProfileOrder(stop=True), model)


Reports = list[tuple[Operated, list[EngineReport]]]


@dataclass(frozen=True, slots=True)
class Addressees:
    """The engines of a command: one or all, of a model or of all."""

    engine: str | None
    model: str | None

    def of(self, models: Sequence[Operated]) -> Sequence[Operated]:
        """Returns the models of the command.

        Raises:
            ModelNotFound: there is no such model.
            InvalidRequest: an engine without a model, if there are several models.
        """
        if self.model is not None:
            named = [model for model in models if self.model in model.names]
            if not named:
                raise ModelNotFound(f"The model `{self.model[:128]}` does not exist.", "model")
            return named
        if self.engine is not None and len(models) > 1:
            raise InvalidRequest("engine needs model: each model has engines of its own.", "model")
        return models


def addressees(
    engine: Annotated[str | None, Query(description="its label; all without")] = None,
    model: ModelName = None,
) -> Addressees:
    return Addressees(engine, model)


Which = Annotated[Addressees, Depends(addressees)]


def _engines(models: Sequence[Operated], name: str | None) -> list[Engines]:
    return [model.client for model in Addressees(None, name).of(models)]


def add_admin_routes(app: FastAPI, models: Sequence[Operated]) -> None:
    """Adds ``/admin/*``, and vLLM's names for some of them."""
    router = APIRouter(dependencies=[Depends(require_operator)])

    async def manage(command: Command, which: Addressees, operator: str) -> Answer:
        names = (which.engine or "(all)")[:64], (which.model or "(all)")[:64]
        logger.warning("%s sends %s to engine %r of %r", operator, command, *names)
        return _answer(
            [
                (model, await model.client.manage(command, which.engine))
                for model in which.of(models)
            ]
        )

    async def reports() -> Reports:
        return [(model, await model.client.engines()) for model in models]

    @router.get("/admin/engines")
    async def engines() -> Answer:
        return _answer(await reports())

    @router.post("/admin/drain")
    async def drain(operator: Operator, which: Which) -> Answer:
        return await manage(Command.DRAIN, which, operator)

    @router.post("/admin/admit")
    async def admit(operator: Operator, which: Which) -> Answer:
        return await manage(Command.ADMIT, which, operator)

    @router.post("/reset_prefix_cache")
    @router.post("/admin/cache/reset")
    async def reset_cache(operator: Operator, which: Which) -> Answer:
        return await manage(Command.RESET_CACHE, which, operator)

    @router.post("/sleep")
    @router.post("/admin/sleep")
    async def sleep(operator: Operator, which: Which, level: str = "1") -> Answer:
        command = sleep_command(int(level) if level.isdecimal() else level)
        return await manage(command, which, operator)

    @router.post("/wake_up")
    @router.post("/admin/wake")
    async def wake(operator: Operator, which: Which, tags: Tags = []) -> Answer:  # noqa: B006
        """Of a sleep of level 2 the tag ``weights`` alone loads the model, and no pages."""
        return await manage(_wake_command(tags), which, operator)

    @router.get("/server_info")
    async def server_info() -> Answer:
        """Returns the settings of the models, by the names that flags have in Python."""
        listed = [{"model": model.names[0], "settings": model.settings} for model in models]
        return {"version": __version__, "models": listed, "vllm_config": models[0].settings}

    @router.get("/is_sleeping")
    async def is_sleeping() -> Answer:
        states = [engine.state for _, engines in await reports() for engine in engines]
        return {"is_sleeping": bool(states) and set(states) == {"asleep"}}

    add_profile_routes(router, partial(_engines, models))
    app.include_router(router)
    add_weight_routes(app, models)


def _wake_command(tags: Sequence[str]) -> Command:
    if not TAGS.issuperset(tags):
        raise InvalidRequest(f"tags must be of {', '.join(sorted(TAGS))}.", "tags")
    return Command.LOAD if set(tags) == {"weights"} else Command.WAKE


def _answer(reports: Reports) -> Answer:
    return {
        "engines": [
            {"model": model.names[0], **report.as_json()}
            for model, engines in reports
            for report in engines
        ]
    }
