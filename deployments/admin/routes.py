"""What an operator may ask and tell, with a key of its own; these routes are not there without."""

import logging
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Query

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.scheduler.commands import Command
from rayfin.deployments.admin.auth import require_operator
from rayfin.deployments.admin.report import EngineReport

logger = logging.getLogger("rayfin.admin")

Answer = dict[str, Any]
Which = Annotated[str | None, Query(description="one engine's label; all of them without")]
Operator = Annotated[str, Depends(require_operator)]
LEVELS = ("0", "1")
"""Of vLLM's ``/sleep``: 0 keeps all memory and 1 the weights; here both are 1. 2 drops the weights,
which nothing could give back."""


class Engines(Protocol):
    """What operators may ask and tell: see ``EngineClient``."""

    async def engines(self) -> list[EngineReport]: ...

    async def manage(self, command: Command, engine: str | None) -> list[EngineReport]: ...


def add_admin_routes(app: FastAPI, client: Engines) -> None:
    """``/admin/*``, and vLLM's names for some of it."""
    router = APIRouter(dependencies=[Depends(require_operator)])

    async def tell(command: Command, engine: str | None, operator: str) -> Answer:
        logger.warning("%s says %s to engine %r", operator, command, (engine or "(all)")[:64])
        return _answer(await client.manage(command, engine))

    @router.get("/admin/engines")
    async def engines() -> Answer:
        return _answer(await client.engines())

    @router.post("/admin/drain")
    async def drain(operator: Operator, engine: Which = None) -> Answer:
        return await tell(Command.DRAIN, engine, operator)

    @router.post("/admin/admit")
    async def admit(operator: Operator, engine: Which = None) -> Answer:
        return await tell(Command.ADMIT, engine, operator)

    @router.post("/reset_prefix_cache")
    @router.post("/admin/cache/reset")
    async def reset_cache(operator: Operator, engine: Which = None) -> Answer:
        return await tell(Command.RESET_CACHE, engine, operator)

    @router.post("/sleep")
    @router.post("/admin/sleep")
    async def sleep(operator: Operator, engine: Which = None, level: str = "1") -> Answer:
        if level not in LEVELS:
            raise InvalidRequest("level must be 0 or 1: the weights stay.", "level")
        return await tell(Command.SLEEP, engine, operator)

    @router.post("/wake_up")
    @router.post("/admin/wake")
    async def wake(operator: Operator, engine: Which = None) -> Answer:
        return await tell(Command.WAKE, engine, operator)

    @router.get("/is_sleeping")
    async def is_sleeping() -> Answer:
        reports = await client.engines()
        return {"is_sleeping": bool(reports) and all(own.state == "asleep" for own in reports)}

    app.include_router(router)


def _answer(reports: list[EngineReport]) -> Answer:
    return {"engines": [report.as_json() for report in reports]}
