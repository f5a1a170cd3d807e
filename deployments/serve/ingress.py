"""The Serve deployment that speaks HTTP: text at the edge, tokens over plain actor handles."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import BackpressureConfig
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.actors.processes.environment import lower_priority
from rayfin.actors.processes.logs import set_up
from rayfin.actors.timing import RETRY_AFTER_SECONDS
from rayfin.deployments.client.engine_names import INGRESS
from rayfin.deployments.edge.backpressure import ReplicaFlow
from rayfin.deployments.generation.limits import ReplySettings
from rayfin.deployments.generation.quotas import TokenQuotas
from rayfin.deployments.http.idempotency import AnswerStore
from rayfin.deployments.http.layers import HttpSettings
from rayfin.deployments.http.request_id import REQUEST_ID
from rayfin.deployments.serve.handle_calls import HandleCalls
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.telemetry.load import Load

Replies = AsyncGenerator[Any, None]


@serve.deployment(
    name=INGRESS,
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=4096,
    max_queued_requests=4096,  # in the proxy, beyond what replicas have; then Serve refuses
    backpressure_config=BackpressureConfig(status_code=429, retry_after_s=RETRY_AFTER_SECONDS),
)
@serve.ingress()
class IngressDeployment:
    """One HTTP replica. ``engines`` are the deployments of the models' engines.

    They, ``prefill`` (engines that only do that), ``admin`` and ``batches`` are bound so that Serve
    deploys them with this one; they are called only to have an engine started.

    ``keeper`` holds the responses that several replicas share.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        server: ServerArgs,
        models: list[ModelArgs],
        edge: HttpSettings,
        engines: list[DeploymentHandle[Any]],
        keeper: DeploymentHandle[Any] | None = None,
        admin: DeploymentHandle[Any] | None = None,
        batches: DeploymentHandle[Any] | None = None,
        prefill: Sequence[DeploymentHandle[Any]] = (),
    ) -> None:
        # Here, for they take a second to import, and the command that deploys this needs none.
        from rayfin.deployments.api.responses.store import ResponseStore
        from rayfin.deployments.api.responses.store_client import ResponseStoreClient
        from rayfin.deployments.serve.model_service import (
            first_services,
            model_service,
            prepare_text,
        )
        from rayfin.deployments.serve.response_store import store_calls

        set_up(models[0].engine.log_format, models[0].engine.log_level)
        lower_priority()
        self._models = models
        self._calls: HandleCalls | None = None
        replica = serve.get_replica_context().replica_id.unique_id
        shared: dict[str, Any] = {
            "load": Load(),
            "answers": AnswerStore(),
            "edge": edge,
            "quotas": _quotas(server),
            "replies": reply_settings(server),
        }
        calls = None if keeper is None else store_calls(keeper)
        store = ResponseStore.over(server.response_dir) if calls is None else None
        self._responses = ResponseStoreClient(replica, calls, store)
        self._batches = None
        if server.batch_dir is not None:
            # Here, for it imports an HTTP client.
            from rayfin.deployments.serve.batch_worker import open_folder

            self._batches = open_folder(server)
        # The services load theirs side by side.
        await asyncio.to_thread(prepare_text, models)
        self._loading = {  # held: the loop does not hold the tasks of models that are late
            asyncio.create_task(model_service(place, model, handle, shared)): model
            for place, (model, handle) in enumerate(zip(models, engines, strict=True))
        }
        self._served = await first_services(self._loading, early=True)

    async def __del__(self) -> None:  # Serve awaits it at the end, when all requests have ended
        served = getattr(self, "_served", None)
        for service in () if served is None else served.services:
            service.client.close()
            if service.adapters is not None:
                service.adapters.close()
            service.checker.close()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)

    # Ray's methods of an LLM deployment, for handles with ``stream=True``.

    async def chat(self, request: Any, raw_request_info: object = None) -> Replies:
        """Yields the answer to a chat completion request, or its events."""
        async for part in self._post("/v1/chat/completions", request):
            yield part

    async def completions(self, request: Any, raw_request_info: object = None) -> Replies:
        """Yields the answer to a completion request, or its events."""
        async for part in self._post("/v1/completions", request):
            yield part

    async def embeddings(self, request: Any, raw_request_info: object = None) -> Replies:
        """Yields the answer to a request for embeddings."""
        async for part in self._post("/v1/embeddings", request):
            yield part

    async def score(self, request: Any, raw_request_info: object = None) -> Replies:
        """Yields the answer to a request for scores."""
        async for part in self._post("/score", request):
            yield part

    async def tokenize(self, request: Any, raw_request_info: object = None) -> Replies:
        """Yields the tokens of a text or conversation."""
        async for part in self._post("/tokenize", request):
            yield part

    async def detokenize(self, request: Any, raw_request_info: object = None) -> Replies:
        """Yields the text of tokens."""
        async for part in self._post("/detokenize", request):
            yield part

    def _post(self, path: str, body: Any) -> Replies:
        """Asks the API in this process; who has a handle needs no key."""
        if self._calls is None:
            from rayfin.deployments.api.app import build_api

            inner = HttpSettings(web=False)
            self._calls = HandleCalls(build_api(models=self._served, edge=inner))
        return self._calls.post(path, body)

    async def served_models(self) -> list[ModelArgs]:
        """What other processes need to use the engines (offline/connect.py), without keys."""
        return self._models

    def __serve_build_asgi_app__(self) -> FastAPI:
        # Here, as in __init__.
        from rayfin.deployments.api.app import build_api

        outer = {
            "serve_adapter": Middleware(ServeReplicaAdapter),
            "flow": Middleware(ReplicaFlow),
        }
        return build_api(
            models=self._served, responses=self._responses, batches=self._batches, outer=outer
        )


class ServeReplicaAdapter:
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


def reply_settings(server: ServerArgs) -> ReplySettings:
    return ReplySettings(
        max_prompts=server.max_prompts,
        trust_chat_templates=server.trust_request_chat_template,
        force_usage=server.enable_force_include_usage,
        tokens_as_ids=server.return_tokens_as_token_ids,
        prompt_tokens_details=server.enable_prompt_tokens_details,
        metrics=server.enable_per_request_metrics,
        drop_images=server.drop_images,
        hide_barred_tools=server.exclude_tools_when_tool_choice_none,
        response_role=server.response_role,
        comment_seconds=server.sse_keep_alive_interval,
    )


def _quotas(server: ServerArgs) -> TokenQuotas | None:
    """This replica's share: requests come to all replicas alike, and none knows of the others."""
    rate = server.tenant_token_rate
    return None if rate is None else TokenQuotas(rate / server.ingress_replicas)
