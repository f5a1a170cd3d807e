"""Where an ``AsyncLLM`` has its engine: in this process, or as actors of its own."""

import asyncio
import os
import uuid
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.parts import RequestPart
from rayfin.deployments.adapters.names import AdapterNames
from rayfin.deployments.client.engine_client import EngineClient
from rayfin.deployments.client.weights import RemoteWeights, WeightsClient
from rayfin.deployments.generation.limits import ReplySettings
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.layers import HttpSettings
from rayfin.deployments.offline.llm import UNLIMITED
from rayfin.deployments.offline.local_client import LocalClient
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.model_service import load_text
from rayfin.deployments.serve.preflight import check_model, shipped
from rayfin.deployments.telemetry.ingress_counters import IngressCounters

if TYPE_CHECKING:
    from rayfin.actors.supervision.supervisor import Supervisor
    from rayfin.deployments.client.pool import EnginePool

MAX_BODY_BYTES = 16 * 2**20


class ModelSource(ABC):
    """Opens the service of one model, once, in the event loop that uses it."""

    _client: "LocalClient | EnginePool | None" = None
    _adapters: AdapterNames | None = None

    @abstractmethod
    async def open(self) -> OpenAIService: ...

    async def prepare(self, part: RequestPart) -> None:
        """Has the opened engine prepare what requests with ``part`` need."""
        assert self._client is not None
        await self._client.prepare(part)

    def close(self) -> None:
        """Leaves or frees the engine; nothing if it was not opened."""
        for part in (self._adapters, self._client):
            if part is not None:
                part.close()
        self._adapters = self._client = None


def own_model(model: ModelArgs) -> ModelArgs:
    """The model of engines whose only client is this process: no queue protects them.

    Raises:
        InvalidConfig: it cannot be served.
    """
    check_model(model.engine)
    return replace(model, engine=replace(model.engine, **UNLIMITED))  # type: ignore[arg-type]


async def service_over(
    model: ModelArgs,
    client: "LocalClient | EnginePool",
    adapters: AdapterNames | None,
    weights: WeightsClient,
) -> OpenAIService:
    """The service of a model in this process, over any engines."""
    counts = IngressCounters()
    over: EngineClient
    if isinstance(client, LocalClient):
        over = client
    else:
        from rayfin.deployments.client.metered import MeteredEngineClient  # imports Ray

        over = MeteredEngineClient(client, counts, model.names[0])
    text, info = await asyncio.to_thread(load_text, model), await client.info()
    server = model.server
    return OpenAIService(
        client=over,
        counts=counts,
        adapters=adapters,
        weights=weights,
        model_names=model.names,
        max_model_len=info.max_model_len,
        **text.fields(),
        template_defaults=server.default_chat_template_kwargs or {},
        edge=HttpSettings(max_body_bytes=MAX_BODY_BYTES, web=False),
        replies=ReplySettings(
            trust_chat_templates=server.trust_request_chat_template,
            prompt_tokens_details=server.enable_prompt_tokens_details,
            drop_images=server.drop_images,
            hide_barred_tools=server.exclude_tools_when_tool_choice_none,
        ),
    )


async def own_adapters(model: ModelArgs, client: "LocalClient | EnginePool") -> AdapterNames | None:
    """The adapters by name, which are read from their folders; None if none is served."""
    if (flags := model.adapters) is None:
        return None
    from rayfin.deployments.adapters.registry import AdapterContents  # imports Ray

    contents = AdapterContents(max_rank=flags.max_rank, root=flags.root)
    return await AdapterNames.of(flags, contents, client.prepare)


class InlineModel(ModelSource):
    """A model whose engine is in this process, where a thread steps it.

    Raises:
        InvalidConfig: it needs several engines, or cannot be served.
    """

    def __init__(self, model: ModelArgs) -> None:
        if model.server.data_parallel_size > 1:
            raise InvalidConfig(
                "data_parallel_size over 1 needs executor='ray', or a server: see --url",
                "data_parallel_size",
            )
        self._model = own_model(model)

    async def open(self) -> OpenAIService:
        self._client = client = await LocalClient.load(shipped(self._model.engine))
        self._adapters = await own_adapters(self._model, client)
        return await service_over(self._model, client, self._adapters, client.weights)


class ActorModel(ModelSource):
    """A model whose engines are Ray actors, which are replaced when they die.

    They end with this process. Ray is started if it does not run, and then stopped with the engine.
    """

    def __init__(self, model: ModelArgs) -> None:
        self._model = own_model(model)
        self._supervisors: list[Supervisor] = []
        self._started_ray = False

    async def open(self) -> OpenAIService:
        from rayfin.actors.supervision.supervisor import Supervisor  # these import Ray
        from rayfin.deployments.client.pool import EnginePool
        from rayfin.deployments.offline.ray_engine import start_ray

        self._started_ray = await asyncio.to_thread(start_ray)
        name = f"async-{uuid.uuid4().hex[:12]}"
        # Detached: they outlive a scheduler's death, and leave when their leases run out.
        args, engines = shipped(self._model.engine), self._model.server.data_parallel_size
        supervisors = [Supervisor(args, f"{name}/engine/", detached=True) for _ in range(engines)]
        self._supervisors = supervisors
        await asyncio.gather(*(supervisor.start() for supervisor in supervisors))
        self._client = client = EnginePool(
            f"{name}-{os.getpid()}", lambda: {each.name: each.scheduler for each in supervisors}
        )
        self._adapters = await own_adapters(self._model, client)
        weights = RemoteWeights(name, "engine", self._model.engine)
        return await service_over(self._model, client, self._adapters, weights)

    def close(self) -> None:
        super().close()
        for supervisor in self._supervisors:
            supervisor.stop()
        self._supervisors = []
        if self._started_ray:
            import ray

            self._started_ray = False
            ray.shutdown()
