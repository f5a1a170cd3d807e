"""The Serve deployment that speaks HTTP: text at the edge, tokens over plain actor handles."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import BackpressureConfig
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, InvalidConfig
from rayfin.actors.hub.actor import HubSettings, start_hub
from rayfin.actors.logs import set_up
from rayfin.actors.messages import EngineInfo
from rayfin.actors.priority import step_behind_runners
from rayfin.deployments.edge.flow import ReplicaFlow
from rayfin.deployments.edge.request_id import REQUEST_ID
from rayfin.deployments.edge.settings import EdgeSettings
from rayfin.deployments.engine_names import engine_prefix, find_engines
from rayfin.deployments.hub_link import HubLink
from rayfin.deployments.ingress_counts import IngressCounts
from rayfin.deployments.keeper import keeper_calls
from rayfin.deployments.models import model_path, tokenizer_path
from rayfin.deployments.observed_client import ObservedClient
from rayfin.deployments.openai.errors import RETRY_SECONDS
from rayfin.deployments.openai.load import Load
from rayfin.deployments.openai.quotas import TokenQuotas
from rayfin.deployments.openai.responses.kept import OwnResponses
from rayfin.deployments.openai.responses.shared import SharedResponses
from rayfin.deployments.openai.routes import build_api
from rayfin.deployments.openai.service import OpenAIService
from rayfin.deployments.ray_client import Patience, RayEngineClient
from rayfin.deployments.requests import sampling_defaults
from rayfin.deployments.server_args import ServerArgs
from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # its packages are an extra
    from rayfin.deployments.tracing import Tracing

NO_TRACING = "otlp_traces_endpoint needs some packages: pip install 'rayfin[tracing]'"


@serve.deployment(
    name="ingress",
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=4096,
    max_queued_requests=4096,  # in the proxy, beyond what replicas have; then Serve refuses
    backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_SECONDS),
)
@serve.ingress()
class IngressDeployment:
    """One HTTP replica. ``engine`` and ``admin`` are only bound so that Serve deploys them too.

    ``keeper`` holds the responses that several replicas share.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        server: ServerArgs,
        engine_args: EngineArgs,
        edge: EdgeSettings,
        engine: DeploymentHandle[Any],
        keeper: DeploymentHandle[Any] | None = None,
        admin: DeploymentHandle[Any] | None = None,
    ) -> None:
        set_up(engine_args.log_format, engine_args.log_level)
        step_behind_runners()
        context = serve.get_replica_context()
        name = server.served_model_name or engine_args.model
        client = RayEngineClient(
            f"ingress-{context.replica_id.unique_id}-{os.getpid()}",
            partial(find_engines, context.app_name),
            patience=Patience(server.engine_timeout, server.replay_timeout),
        )
        tokenizer = await asyncio.to_thread(
            Tokenizer.load,
            tokenizer_path(engine_args),
            engine_args.revision,
            engine_args.trust_remote_code,
        )
        defaults = {}
        if server.generation_config == "auto":
            defaults = sampling_defaults(model_path(engine_args.model), engine_args.revision)
        endpoint = server.otlp_traces_endpoint
        tracing = None if endpoint is None else start_tracing(endpoint, name)
        info = await _first_info(client)
        load = Load()
        counts = IngressCounts(lambda: load.in_flight)
        hub = HubSettings(
            engine_prefix(context.app_name), name, server.metrics_alias, server.metrics_port
        )
        link = HubLink(partial(start_hub, context.app_name, hub), ray.kill, counts.report)
        self._service = OpenAIService(
            client=ObservedClient(client, counts, name, link, server.metrics_alias, tracing),
            load=load,
            counts=counts,
            tokenizer=tokenizer,
            model_names=[name],
            max_model_len=info.max_model_len,
            chat_template=_template(server.chat_template),
            sampling_defaults=defaults,
            edge=edge,
            tracing=tracing,
            quotas=_quotas(server),
            responses=OwnResponses()
            if keeper is None
            else SharedResponses(context.replica_id.unique_id, keeper_calls(keeper)),
        )

    async def __del__(self) -> None:  # Serve awaits it at the end, when all requests have ended
        service = getattr(self, "_service", None)
        if service is not None and service.tracing is not None:
            await asyncio.to_thread(service.tracing.close)

    def __serve_build_asgi_app__(self) -> FastAPI:
        app = build_api(self._service)
        app.add_middleware(ReplicaFlow)
        app.add_middleware(BehindServe)
        return app


class BehindServe:
    """ASGI around what Serve's proxy does its own way.

    ``receive`` fails with Ray's error when a client has left; and every answer gets the request's
    id from the proxy, which would make it two.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = False

        async def receive_or_gone() -> Message:
            nonlocal gone
            try:
                if not gone:
                    return await receive()
            except RayError:
                gone = True
            return {"type": "http.disconnect"}

        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)[REQUEST_ID]
            await send(message)

        await self._app(scope, receive_or_gone, without_id)


def start_tracing(endpoint: str, model: str) -> "Tracing":
    """Spans that go to an OTLP collector.

    Raises:
        InvalidConfig: the packages for it are not installed.
    """
    try:
        from rayfin.deployments.tracing import Tracing
    except ImportError:
        raise InvalidConfig(NO_TRACING, "otlp_traces_endpoint") from None
    return Tracing.to(endpoint, model)


async def _first_info(client: RayEngineClient) -> EngineInfo:
    """Waits for the engine, however long its model takes to load."""
    while True:
        try:
            return await client.info()
        except EngineUnavailable:
            continue


def _quotas(server: ServerArgs) -> TokenQuotas | None:
    """This replica's share: requests come to all replicas alike, and none knows of the others."""
    rate = server.tenant_token_rate
    return None if rate is None else TokenQuotas(rate / server.ingress_replicas)


def _template(value: str | None) -> str | None:
    """A template is given as text or as a file."""
    if value is not None and "{" not in value:
        return Path(value).read_text(encoding="utf-8")
    return value
