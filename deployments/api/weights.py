"""The operators' routes of new weights, with vLLM's names for them; SGLang's are beside this.

Bodies name files that every node sees. Nothing is unpickled, and no caller's function runs.
"""

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from rayfin.actors.errors import EngineBusy, InvalidRequest, ModelNotFound
from rayfin.actors.messages import Command
from rayfin.actors.timing import WEIGHTS_CALL_SECONDS, WEIGHTS_PAUSE_SECONDS
from rayfin.actors.weights.drafts import PREFIX
from rayfin.actors.weights.version import (
    BASE_LABEL,
    EngineOrder,
    KeptPages,
    NewRequests,
    PauseMode,
)
from rayfin.deployments.api.sglang_weights import add_sglang_routes
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.client.weights import (
    UpdateOptions,
    WeightsClient,
    call_workers,
    states_as_json,
)
from rayfin.deployments.http.auth import require_operator
from rayfin.deployments.http.json_body import read_body, read_optional

logger = logging.getLogger("rayfin.admin")

Answer = dict[str, Any]
Operator = Annotated[str, Depends(require_operator)]


class Managed(Protocol):
    """The part of ``EngineClient`` that these routes use."""

    async def manage(self, command: Command, engine: str | None) -> list[EngineReport]: ...


class WeightedModel(Protocol):
    """A model whose weights may change."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def client(self) -> Managed: ...

    @property
    def weights(self) -> WeightsClient | None: ...


class WeightsRequest(BaseModel):
    """The body of /admin/weights."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str | None = Field(None, min_length=1, max_length=4096)
    version: str = Field("", max_length=256)
    mode: PauseMode = "keep"
    kv: KeptPages = "recompute"
    new: NewRequests = "wait"
    partial: bool = False
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    order: EngineOrder = "together"
    target: Literal["model", "draft"] = "model"
    timeout: float | None = Field(None, gt=0, le=WEIGHTS_CALL_SECONDS)


class RpcRequest(BaseModel):
    """The body of vLLM's /collective_rpc."""

    model_config = ConfigDict(extra="ignore", strict=True)

    method: str = Field(max_length=256)
    args: list[Any] = Field(default_factory=list, max_length=16)
    kwargs: dict[str, Any] = Field(default_factory=dict)


class GroupInfo(BaseModel):
    """vLLM's init_info: where a trainer opens its group, and the receiver's rank in it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    backend: Literal["gloo"]
    master_address: str = Field(min_length=1, max_length=256)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(1, ge=1, le=1)
    world_size: int = Field(2, ge=2, le=2)


class InitRequest(BaseModel):
    """The body of vLLM's /init_weight_transfer_engine."""

    init_info: GroupInfo


class BucketInfo(BaseModel):
    """vLLM's update_info: the tensors that the trainer broadcasts next, in this order."""

    model_config = ConfigDict(extra="ignore", strict=True)

    names: list[Annotated[str, Field(min_length=1, max_length=1024)]]
    dtype_names: list[str]
    shapes: list[list[Annotated[int, Field(ge=0, le=2**31)]]]
    packed: Literal[False] = False


class BucketRequest(BaseModel):
    """The body of vLLM's /update_weights."""

    update_info: BucketInfo


class FinishRequest(BaseModel):
    """The body of /finish_weight_update: vLLM's has none, so each field has a default."""

    model_config = ConfigDict(extra="ignore", strict=True)

    version: str = Field("", max_length=256)
    mode: PauseMode = "keep"
    kv: KeptPages = "recompute"
    new: NewRequests = "wait"
    order: EngineOrder = "together"


class LabelRequest(BaseModel):
    """The body of /update_weight_version."""

    model_config = ConfigDict(extra="ignore", strict=True)

    new_version: str = Field(min_length=1, max_length=256)


class CheckRequest(BaseModel):
    """The body of vLLM's /weight_checker and SGLang's /weights_checker, which may be empty."""

    model_config = ConfigDict(extra="ignore", strict=True)

    action: Literal["checksum", "snapshot", "compare"] = "checksum"


class WeightRoutes:
    """What the routes do with the models of the server."""

    def __init__(self, models: Sequence[WeightedModel]) -> None:
        self._models = models
        self._snapshot = ""  # digest of the weights that others are compared with

    def of(self, name: str | None) -> WeightsClient:
        """The weights of a model; None names the only one.

        Raises:
            ModelNotFound: there is no such model.
            InvalidRequest: there are several models, or its weights cannot change.
        """
        if name is None and len(self._models) > 1:
            raise InvalidRequest("model is needed: there are several.", "model")
        for model in self._models:
            if name is None or name in model.names:
                if model.weights is None:
                    raise InvalidRequest("The weights of this model cannot change.", "model")
                return model.weights
        raise ModelNotFound(f"The model `{(name or '')[:128]}` does not exist.", "model")

    async def state(self, name: str | None) -> Answer:
        """What the engines of a model say of their weights."""
        return states_as_json(await self.of(name).states())

    async def load(self, name: str | None, operator: str, body: WeightsRequest) -> Answer:
        """Makes all engines of a model serve what lies at a path, or what was sent."""
        options = UpdateOptions(**body.model_dump(exclude={"path", "version"}))
        return await self.update(operator, body.path, body.version, options, name)

    async def update(
        self,
        operator: str,
        path: str | None,
        version: str,
        options: UpdateOptions,
        name: str | None = None,
    ) -> Answer:
        """See ``WeightsClient.update``; it is logged."""
        logger.warning("%s gives new weights: %r", operator, path or version)
        return await self.of(name).update(path, version, options)

    async def rename(self, operator: str, body: LabelRequest) -> Answer:
        """Gives the weights that are served another name; requests go on."""
        logger.warning("%s names the weights %r", operator, body.new_version)
        return await self.of(None).rename(body.new_version)

    async def check(self, body: CheckRequest) -> Answer:
        """The digest of the weights; compared with that of the last snapshot, if asked.

        Raises:
            EngineBusy: there was no snapshot here.
        """
        digest = (await self.state(None))["digest"]
        if body.action == "compare" and not self._snapshot:
            raise EngineBusy("no snapshot was made here", "action")
        if body.action == "snapshot":
            self._snapshot = digest or BASE_LABEL
        same = body.action != "compare" or self._snapshot == (digest or BASE_LABEL)
        return {"success": same, "digest": digest}

    async def finish(self, operator: str, body: FinishRequest) -> Answer:
        """Commits the tensors that the receiver has got since the update was begun."""
        await self.of(None).ask_receiver("finish", body.version)
        options = UpdateOptions(**body.model_dump(exclude={"version"}))
        return await self.update(operator, None, body.version, options)

    async def manage(self, command: Command) -> None:
        """Sends a command to all engines."""
        for model in self._models:
            await model.client.manage(command, None)

    async def call(self, operator: str, body: RpcRequest) -> list[Any]:
        """See ``call_workers``."""
        logger.warning("%s calls %r", operator, body.method)
        return await call_workers(self.of(None), self.manage, body.method, body.args, body.kwargs)


Model = Annotated[str | None, Query(description="whose weights, where there are several models")]


def add_weight_routes(app: FastAPI, models: Sequence[WeightedModel]) -> None:
    """Adds /admin/weights, and the routes of vLLM's and SGLang's that trainers call."""
    router, routes = APIRouter(dependencies=[Depends(require_operator)]), WeightRoutes(models)
    _add_native(router, routes)
    _add_vllm(router, routes)
    add_sglang_routes(router, routes)
    app.include_router(router)


def _add_native(router: APIRouter, routes: WeightRoutes) -> None:
    @router.get("/admin/weights")
    async def weights(model: Model = None) -> Answer:
        return await routes.state(model)

    @router.post("/admin/weights")
    async def load(request: Request, operator: Operator, model: Model = None) -> Answer:
        return await routes.load(model, operator, await read_body(request, WeightsRequest))

    @router.put("/admin/weights/update")
    async def send(
        request: Request,
        operator: Operator,
        version: Annotated[str, Query(min_length=1, max_length=256)],
        model: Model = None,
    ) -> Answer:
        """Begins an update with the body, a safetensors file; ``POST /admin/weights`` commits."""
        logger.warning("%s sends weights: %r", operator, version)
        begun = await routes.of(model).receive(request.stream(), version)
        return {"version": begun.label, "digest": begun.digest}

    @router.delete("/admin/weights/update")
    async def abandon(operator: Operator, model: Model = None) -> Answer:
        logger.warning("%s abandons an update", operator)
        await routes.of(model).abandon()
        return {"status": "abandoned"}

    @router.post("/pause")
    async def pause(
        model: Model = None,
        mode: PauseMode = "abort",
        new: NewRequests = "wait",
        clear_cache: bool = True,
        timeout: Annotated[float, Query(gt=0, le=86400)] = WEIGHTS_PAUSE_SECONDS,
    ) -> Answer:
        await routes.of(model).pause(mode, new, timeout)
        if clear_cache:
            await routes.manage(Command.RESET_CACHE)
        return {"status": "paused"}

    @router.post("/resume")
    async def resume(model: Model = None) -> Answer:
        await routes.of(model).resume()
        return {"status": "resumed"}

    @router.get("/is_paused")
    async def is_paused(model: Model = None) -> Answer:
        return {"is_paused": (await routes.state(model))["paused"]}


def _add_vllm(router: APIRouter, routes: WeightRoutes) -> None:
    @router.post("/collective_rpc")
    async def collective_rpc(request: Request, operator: Operator) -> Answer:
        return {"results": await routes.call(operator, await read_body(request, RpcRequest))}

    @router.get("/get_world_size")
    async def world_size() -> Answer:
        """One process receives for all engines."""
        return {"world_size": 1}

    @router.post("/init_weight_transfer_engine")
    async def join(request: Request) -> Answer:
        info = (await read_body(request, InitRequest)).init_info
        place = (info.master_address, info.master_port, info.rank_offset)
        await routes.of(None).ask_receiver("join", *place)
        return {"message": "Weight transfer initialized"}

    @router.post("/start_weight_update")
    async def begin() -> Answer:
        await routes.of(None).ask_receiver("begin")
        return {"message": "Weight update started"}

    @router.post("/start_draft_weight_update")
    async def begin_draft() -> Answer:
        """Of the tensors of a draft model or head alone, by its names."""
        await routes.of(None).ask_receiver("begin", PREFIX)
        return {"message": "Draft weight update started"}

    @router.post("/update_weights")
    async def receive(request: Request) -> Answer:
        bucket = (await read_body(request, BucketRequest)).update_info
        await routes.of(None).ask_receiver(
            "receive", bucket.names, bucket.dtype_names, bucket.shapes
        )
        return {"message": "Weights updated"}

    @router.post("/finish_weight_update")
    async def finish(request: Request, operator: Operator) -> Answer:
        return await routes.finish(operator, await read_optional(request, FinishRequest))

    @router.post("/shutdown_weight_transfer_engine")
    async def leave() -> Answer:
        await routes.of(None).ask_receiver("leave")
        return {"message": "Weight transfer ended"}

    @router.get("/weight_info")
    async def weight_info(model: Model = None) -> Answer:
        return await routes.state(model)

    @router.post("/update_weight_version")
    async def rename(request: Request, operator: Operator) -> Answer:
        report = await routes.rename(operator, await read_body(request, LabelRequest))
        return {"success": True, "new_version": report["version"], **report}

    @router.post("/weight_checker")
    @router.post("/weights_checker")
    async def check(request: Request) -> Answer:
        return await routes.check(await read_optional(request, CheckRequest))
