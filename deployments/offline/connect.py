"""``rayfin.connect``: an ``AsyncLLM`` over a model that an application on this cluster serves."""

import asyncio
import os
import uuid

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus

from rayfin.deployments.client.engine_names import INGRESS
from rayfin.deployments.client.weights import RemoteWeights
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.offline.async_engines import ModelSource, service_over
from rayfin.deployments.offline.async_llm import AsyncLLM
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.model_service import adapter_names, engine_pool


class ServedModel(ModelSource):
    """A model of a running application: its engines, and its tokenizer in this process."""

    def __init__(self, application: str, model: str | None) -> None:
        self._application = application
        self._model = model

    async def open(self) -> OpenAIService:
        model, app = await self._find(), self._application
        caller = f"program-{uuid.uuid4().hex[:12]}-{os.getpid()}"
        engines = serve.get_deployment_handle(model.deployment, app)
        self._client = client = engine_pool(caller, model, engines, app)
        self._adapters = await adapter_names(app, model, client)
        weights = RemoteWeights(app, model.deployment, model.engine)
        return await service_over(model, client, self._adapters, weights)

    async def _find(self) -> ModelArgs:
        """Asks an ingress of the application for its models.

        Raises:
            ValueError: there is no such application or model, or it has failed to start.
        """
        app = self._application
        running = (await asyncio.to_thread(serve.status)).applications
        if app not in running:
            names = ", ".join(map(repr, running)) or "none"
            raise ValueError(f"there is no application {app!r}; there is {names}")
        if INGRESS not in running[app].deployments:
            raise ValueError(f"the application {app!r} is not one of Rayfin's")
        ready = "RUNNING" in running[app].deployments[INGRESS].replica_states
        if not ready and running[app].status is ApplicationStatus.DEPLOY_FAILED:
            raise ValueError(f"the application {app!r} has failed: {running[app].message}")
        handle = serve.get_deployment_handle(INGRESS, app)
        try:
            models: list[ModelArgs] = await handle.served_models.remote()
        except (RayError, AttributeError) as error:
            raise ValueError(f"the application {app!r} does not answer: {error}") from error
        for model in models:
            if self._model is None or self._model in model.names:
                return model
        names = ", ".join(name for model in models for name in model.names)
        raise ValueError(f"{app!r} serves no model {self._model!r}; it serves {names}")


async def connect(
    application: str = "default",
    model: str | None = None,
    *,
    tenant: str = "",
    background: bool = False,
) -> AsyncLLM:
    """Connects a program on the cluster with a served model; requests pass no HTTP.

    Requests outlive engines as those of HTTP clients do. No key is needed: who can call actors of
    the cluster is trusted. An update of the model ends the connection: connect again.

    Args:
        application: the name of the application: "rayfin" after ``rayfin serve``.
        model: one of its models by its name; None is the first one.
        tenant: whose requests they are, for policies and metrics.
        background: they run behind all other requests, as lines of batches do.

    Raises:
        ValueError: there is no such application or model.
        RuntimeError: this process is not connected to Ray.
    """
    if not ray.is_initialized():
        raise RuntimeError("connect needs Ray: call ray.init(address='auto') before it")
    caller = Caller(tenant, background=background)
    return await AsyncLLM(ServedModel(application, model), caller).__aenter__()
