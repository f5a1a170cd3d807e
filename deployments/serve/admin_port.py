"""A port of the operators' own: their routes and nothing else, where no client need get."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from ray import serve

from rayfin import __version__
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, InvalidConfig
from rayfin.actors.metrics.hub import HEAD
from rayfin.actors.timing import ADMIN_BIND_PAUSE_SECONDS, ADMIN_BIND_SECONDS, ADMIN_STOP_SECONDS
from rayfin.deployments.api.admin import Operated, add_admin_routes
from rayfin.deployments.client.engine_names import find_engines
from rayfin.deployments.client.pool import EnginePool
from rayfin.deployments.client.weights import RemoteWeights
from rayfin.deployments.edge.proxy import limit_heads
from rayfin.deployments.http.errors import add_error_handlers
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.layers import HttpSettings, arrange, settings_layers

logger = logging.getLogger("rayfin.admin")


def build_admin_api(
    models: Sequence[Operated], keys: ApiKeys, clients: ApiKeys | None = None
) -> FastAPI:
    """The routes behind the limits that all have, and behind the operators' keys.

    Args:
        clients: keys of the API, which open nothing here.
    """
    layers = settings_layers(HttpSettings(keys=clients, admin_keys=keys, web=False))
    layers["auth"] = None
    app = FastAPI(
        title="Rayfin's operators",
        version=__version__,
        openapi_url=None,
        redirect_slashes=False,
        middleware=arrange("replica", layers),
    )
    add_error_handlers(app)
    add_admin_routes(app, models)
    return app


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address, that does not listen yet.

    Raises:
        InvalidConfig: somebody has it, or there is no such address here.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise InvalidConfig(
            f"admin_port: cannot listen on {host}:{port}: {reason}", "admin_port"
        ) from None
    return listener


AdminModel = tuple[list[str], str, dict[str, Any], EngineArgs]
"""A model's names, the deployment of its engines, and its settings: all, and those of engines."""


@serve.deployment(
    name="admin",
    num_replicas=1,
    ray_actor_options={"num_cpus": 0, "resources": {HEAD: 0.001}},
    graceful_shutdown_timeout_s=ADMIN_STOP_SECONDS,
)
class AdminDeployment:
    """Listens on the cluster's head node; Serve starts another where it dies.

    It needs no ingress: what an ingress cannot be asked any more, can be asked here.

    Raises:
        InvalidConfig: somebody has the port, and keeps it.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        host: str,
        port: int,
        keys: ApiKeys,
        clients: ApiKeys | None,
        models: Sequence[AdminModel],
    ) -> None:
        address = await _bind_in_time(host, port)
        context = serve.get_replica_context()
        name = f"admin-{context.replica_id.unique_id}-{os.getpid()}"
        self._clients = {
            deployment: EnginePool(name, partial(find_engines, context.app_name, deployment))
            for _, deployment, *_ in models
        }
        operated = [
            Operated(
                names,
                self._clients[deployment],
                settings,
                RemoteWeights(context.app_name, deployment, engine),
            )
            for names, deployment, settings, engine in models
        ]
        limit_heads()
        config = uvicorn.Config(
            build_admin_api(operated, keys, clients), log_level="warning", lifespan="off"
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[address]))
        logger.info("operators' routes are at %s:%d", host, port)

    def check_health(self) -> None:
        """Raises:
        EngineUnavailable: nothing listens any more.
        """
        if self._serving.done():
            raise EngineUnavailable("the operators' port is closed")

    async def __del__(self) -> None:  # Serve awaits it at the end
        self._server.should_exit = True
        await self._serving
        for client in self._clients.values():
            client.close()


class _Server(uvicorn.Server):
    """Ray has the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _bind_in_time(host: str, port: int) -> socket.socket:
    deadline = asyncio.get_running_loop().time() + ADMIN_BIND_SECONDS
    while True:
        try:
            return bind(host, port)
        except InvalidConfig as error:
            if asyncio.get_running_loop().time() > deadline:
                raise
            logger.warning("%s", error)
        await asyncio.sleep(ADMIN_BIND_PAUSE_SECONDS)


def admin_deployment(
    host: str,
    port: int,
    keys: ApiKeys | None,
    clients: ApiKeys | None,
    models: Sequence[AdminModel],
) -> Any:
    """The bound deployment.

    Args:
        clients: keys of the API.

    Raises:
        InvalidConfig: no admin key is set, so the port would be open to everyone.
    """
    if keys is None:
        raise InvalidConfig("admin_port needs admin_api_key", "admin_port")
    deployment: Any = AdminDeployment  # Ray's stubs lose what @serve.deployment adds
    return deployment.bind(host, port, keys, clients, models)
