"""POST /start_profile and /stop_profile, vLLM's names: a profile of steps into --profile-dir."""

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from rayfin.actors.parts import RequestPart
from rayfin.actors.profile import DEFAULT_STEPS, MAX_STEPS, ProfileOrder
from rayfin.deployments.http.json_body import read_body

Which = Annotated[str | None, Query(description="whose engines; all without")]


class Prepares(Protocol):
    """The part of a model's engines that profiles need."""

    async def prepare(self, part: RequestPart) -> None: ...


FindEngines = Callable[[str | None], Sequence[Prepares]]


class ProfileRequest(BaseModel):
    """The body of /start_profile, which may be empty."""

    model_config = ConfigDict(extra="forbid", strict=True)

    profile_prefix: str = Field(default="", pattern=r"^[\w.-]{0,64}$")
    delay_iterations: int = Field(default=0, ge=0)
    max_iterations: int = Field(default=DEFAULT_STEPS, ge=1, le=MAX_STEPS)


def add_profile_routes(router: APIRouter, engines: FindEngines) -> None:
    """Adds the routes to those of operators; ``engines`` finds those of a model, or all."""

    async def order(what: ProfileOrder, model: str | None) -> Response:
        for client in engines(model):
            await client.prepare(what)
        return Response()

    @router.post("/start_profile")
    async def start_profile(request: Request, model: Which = None) -> Response:
        body = ProfileRequest()
        if await request.body():
            body = await read_body(request, ProfileRequest)
        begin = ProfileOrder(False, body.profile_prefix, body.delay_iterations, body.max_iterations)
        return await order(begin, model)

    @router.post("/stop_profile")
    async def stop_profile(model: Which = None) -> Response:
        return await order(ProfileOrder(stop=True), model)
