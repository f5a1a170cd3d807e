"""SGLang's routes of new weights: its bodies, and what they mean here.

Tensors come in a gloo group, between /begin_weight_update and /end_weight_update; nothing changes
before the second.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import Command
from rayfin.actors.weights.version import KeptPages, PauseMode
from rayfin.deployments.client.weights import UpdateOptions
from rayfin.deployments.http.auth import require_operator
from rayfin.deployments.http.json_body import read_body, read_optional

if TYPE_CHECKING:
    from rayfin.deployments.api.weights import WeightRoutes

Answer = dict[str, Any]
Operator = Annotated[str, Depends(require_operator)]

MODES: Mapping[str, tuple[PauseMode, KeptPages]] = {
    "abort": ("abort", "recompute"),
    "retract": ("keep", "recompute"),
    "in_place": ("keep", "keep"),
}

PICKLED = (
    "its tensors come pickled, and pickles are never read: give safetensors to /admin/weights, "
    "tensors to rayfin.connect(...).update_weights, or send them in a gloo group by "
    "/init_weights_update_group"
)

TAGS = {"weights", "kv_cache", "cuda_graph"}


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class GivenWeights(_Body):
    """What bodies have in common that end in other weights."""

    weight_version: str | None = Field(None, max_length=256)
    abort_all_requests: bool = False
    flush_cache: bool = True

    @property
    def options(self) -> UpdateOptions:
        """How the weights change."""
        mode: PauseMode = "abort" if self.abort_all_requests else "keep"
        return UpdateOptions(mode, "recompute" if self.flush_cache else "keep")


class DiskRequest(GivenWeights):
    """The body of /update_weights_from_disk."""

    model_path: str = Field(min_length=1, max_length=4096)


class PauseRequest(_Body):
    """The body of /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class GroupRequest(_Body):
    """The body of /init_weights_update_group."""

    master_address: str = Field(min_length=1, max_length=256)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(1, ge=1, le=1)
    world_size: int = Field(2, ge=2, le=2)
    backend: Literal["gloo"]


class SentTensors(_Body):
    """The body of /update_weights_from_distributed: what the trainer broadcasts next."""

    names: list[Annotated[str, Field(min_length=1, max_length=1024)]]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0, le=2**31)]]]
    load_format: Literal["auto"] | None = None


class NameRequest(_Body):
    """The body of /get_weights_by_name."""

    name: str = Field(min_length=1, max_length=1024)
    truncate_size: int = Field(100, ge=1, le=100_000)


class MemoryRequest(_Body):
    """The body of /release_memory_occupation and its counterpart."""

    tags: list[str] | None = None

    @property
    def wanted(self) -> set[str]:
        """What is freed or taken; all without tags.

        Raises:
            InvalidRequest: a tag is unknown.
        """
        if not TAGS.issuperset(self.tags or ()):
            raise InvalidRequest(f"tags must be of {', '.join(sorted(TAGS))}.", "tags")
        return set(self.tags or TAGS)


def add_sglang_routes(router: APIRouter, routes: "WeightRoutes") -> None:
    """Adds them to those of operators."""
    _add_updates(router, routes)
    _add_group(router, routes)
    _add_pauses(router, routes)


def _add_updates(router: APIRouter, routes: "WeightRoutes") -> None:
    @router.post("/update_weights_from_disk")
    async def from_disk(request: Request, operator: Operator) -> Answer:
        body = await read_body(request, DiskRequest)
        report = await routes.update(
            operator, body.model_path, body.weight_version or "", body.options
        )
        return {"success": True, "message": "Weights are updated.", **report}

    @router.post("/update_weights_from_tensor")
    async def refuse() -> Answer:
        raise InvalidRequest(PICKLED, None, "unsupported")

    @router.get("/get_weight_version")
    @router.get("/weight_version")
    async def version(
        model: Annotated[str | None, Query(description="whose weights")] = None,
    ) -> Answer:
        return {"weight_version": (await routes.state(model))["version"]}

    @router.post("/get_weights_by_name")
    async def weights_by_name(request: Request) -> list[Any]:
        body = await read_body(request, NameRequest)
        return await routes.of(None).numbers(body.name, body.truncate_size)


def _add_group(router: APIRouter, routes: "WeightRoutes") -> None:
    @router.post("/init_weights_update_group")
    async def join(request: Request) -> Answer:
        body = await read_body(request, GroupRequest)
        place = (body.master_address, body.master_port, body.rank_offset)
        await routes.of(None).ask_receiver("join", *place)
        return {"success": True, "message": "The group is joined."}

    @router.post("/begin_weight_update")
    async def begin() -> Answer:
        await routes.of(None).ask_receiver("begin")
        return {"success": True, "message": "An update is begun."}

    @router.post("/update_weights_from_distributed")
    async def receive(request: Request) -> Answer:
        body = await read_body(request, SentTensors)
        await routes.of(None).ask_receiver("receive", body.names, body.dtypes, body.shapes)
        return {"success": True, "message": "The tensors have come."}

    @router.post("/end_weight_update")
    async def end(request: Request, operator: Operator) -> Answer:
        body, weights = await read_optional(request, GivenWeights), routes.of(None)
        label = body.weight_version or ""
        await weights.ask_receiver("finish", label)
        report = await routes.update(operator, None, label, body.options)
        return {"success": True, "message": "Weights are updated.", **report}

    @router.post("/destroy_weights_update_group")
    async def leave() -> Answer:
        await routes.of(None).ask_receiver("leave")
        return {"success": True, "message": "The group is left."}


def _add_pauses(router: APIRouter, routes: "WeightRoutes") -> None:
    @router.post("/pause_generation")
    async def pause(request: Request) -> Answer:
        body = await read_optional(request, PauseRequest)
        mode, kept = MODES[body.mode]
        await routes.of(None).pause(mode)
        if kept == "recompute":
            await routes.manage(Command.RESET_CACHE)
        return {"message": "Generation paused successfully.", "status": "ok"}

    @router.post("/continue_generation")
    async def resume() -> Answer:
        await routes.of(None).resume()
        return {"message": "Generation continued successfully.", "status": "ok"}

    @router.post("/flush_cache")
    async def flush() -> Answer:
        await routes.manage(Command.RESET_CACHE)
        return {"success": True, "message": "Cache flushed."}

    @router.post("/release_memory_occupation")
    async def release(request: Request) -> Answer:
        wanted = (await read_optional(request, MemoryRequest)).wanted
        await routes.manage(Command.SLEEP_DEEP if "weights" in wanted else Command.SLEEP)
        return {}

    @router.post("/resume_memory_occupation")
    async def occupy(request: Request) -> Answer:
        wanted = (await read_optional(request, MemoryRequest)).wanted
        await routes.manage(Command.WAKE if "kv_cache" in wanted else Command.LOAD)
        return {}
