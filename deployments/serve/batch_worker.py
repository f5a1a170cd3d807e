"""The Serve deployment that runs batches: an ingress without a door.

It has the services and the routes of an ingress, and calls them in its own process. So a line gets
the checks, the templates, the failover and the answer of the route that it names.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rayfin.actors.errors import EngineUnavailable, ModelNotFound
from rayfin.actors.metrics.ledger import CounterReport
from rayfin.actors.processes.environment import lower_priority
from rayfin.actors.processes.logs import set_up
from rayfin.deployments.api.app import build_api
from rayfin.deployments.batches.folder import BatchFolder
from rayfin.deployments.batches.lines import MAX_LINE_BYTES
from rayfin.deployments.batches.sender import NO_TIMEOUT
from rayfin.deployments.batches.worker import TENANT, BatchWorker, add_series
from rayfin.deployments.generation.limits import ReplySettings
from rayfin.deployments.http.idempotency import AnswerStore
from rayfin.deployments.http.layers import HttpSettings
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.model_service import first_services, model_service, prepare_text
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.telemetry.load import Load

SLOTS = 64  # of an engine whose settings do not say


@serve.deployment(
    name="batches",
    num_replicas=1,
    ray_actor_options={"num_cpus": 0},
    graceful_shutdown_timeout_s=5,
)
class BatchDeployment:
    """Runs the batches of ``server.batch_dir``; a new replica goes on where an earlier one died."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        server: ServerArgs,
        models: list[ModelArgs],
        engines: list[DeploymentHandle[Any]],
        replies: ReplySettings,
        in_flight: int,
    ) -> None:
        set_up(models[0].engine.log_format, models[0].engine.log_level)
        lower_priority()
        self._folder = open_folder(server)
        self._worker: BatchWorker | None = None
        self._models = models
        shared: dict[str, Any] = {
            "load": Load(),
            "answers": AnswerStore(),
            "edge": HttpSettings(max_body_bytes=2 * MAX_LINE_BYTES, web=False),
            "replies": replies,
        }
        # The services load theirs side by side.
        await asyncio.to_thread(prepare_text, models)
        self._loading = {
            asyncio.create_task(
                model_service(
                    place, model, handle, shared, self._report if place == 0 else no_ingress
                )
            ): model
            for place, (model, handle) in enumerate(zip(models, engines, strict=True))
        }
        self._served = await first_services(self._loading)
        app = BackgroundCalls(build_api(models=self._served))
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False),
            base_url="http://rayfin",
            timeout=NO_TIMEOUT,
        )
        self._worker = BatchWorker(self._folder, self._client, self._serves, in_flight)
        self._task = asyncio.create_task(self._worker.run())

    def check_health(self) -> None:
        """Raises:
        EngineUnavailable: the worker has ended; Serve starts another.
        """
        if self._task.done():
            raise EngineUnavailable("the worker of batches has ended")

    async def __del__(self) -> None:  # Serve awaits it at the end
        if (task := getattr(self, "_task", None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        served = getattr(self, "_served", None)
        for service in () if served is None else served.services:
            service.client.close()
            service.checker.close()
            if service.adapters is not None:
                service.adapters.close()

    def _serves(self, name: str) -> bool:
        if any(model.server.adapter_flags().root is not None for model in self._models):
            return True  # an adapter is looked for when a line names it
        try:
            self._served.named(name)
        except ModelNotFound:
            return False
        except EngineUnavailable:  # it may join
            return True
        return True

    def _report(self, report: CounterReport) -> CounterReport:
        no_ingress(report)
        if self._worker is not None:
            add_series(report, self._folder.batches(), self._worker.counts, time.time())
        return report


class BackgroundCalls:
    """ASGI: requests of this process run in the background, for the tenant that a header names.

    No client reaches it: the header is the worker's own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = Headers(scope=scope).get(TENANT, "")
            scope["state"] = {**scope.get("state", {}), "tenant": tenant, "background": True}
        await self._app(scope, receive, send)


def open_folder(server: ServerArgs) -> BatchFolder:
    """Raises:
    InvalidConfig: there is no folder, or it cannot be written.
    """
    assert server.batch_dir is not None
    return BatchFolder(Path(server.batch_dir), server.batch_limits())


def concurrency(server: ServerArgs, models: Sequence[ModelArgs]) -> int:
    """Lines in flight: by default twice what the engines run at once."""
    if server.batch_concurrency is not None:
        return server.batch_concurrency
    slots = sum(
        (model.engine.max_decoding_batch or SLOTS) * max(1, model.server.data_parallel_size)
        for model in models
    )
    return 2 * slots


def no_ingress(report: CounterReport) -> CounterReport:
    """The worker answers no client, and is no ingress."""
    report.gauges["ingress_replicas", ()] = 0
    return report
