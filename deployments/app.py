"""The wiring of a Rayfin application, top to bottom: what ``serve deploy`` imports."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from rayfin.actors.config import EngineArgs
from rayfin.actors.supervision.placement import bundles, pick_cluster_device
from rayfin.actors.timing import ENGINE_STOP_SECONDS, HANDOVER_SECONDS, INGRESS_DRAIN_SECONDS
from rayfin.deployments.adapters.flags import CLIENTS_MAY_LOAD
from rayfin.deployments.http.body_limits import (
    MAX_BODY_BYTES,
    MAX_MEDIA_BODY_BYTES,
    RECORDING_FORM_BYTES,
)
from rayfin.deployments.http.layers import Cors, HttpSettings
from rayfin.deployments.serve.autoscaling import autoscaling
from rayfin.deployments.serve.engine import EngineDeployment
from rayfin.deployments.serve.ingress import IngressDeployment, reply_settings
from rayfin.deployments.serve.model_args import SECRETS, ModelArgs, several_models
from rayfin.deployments.serve.preflight import located, shipped
from rayfin.deployments.serve.server_args import (
    ADMIN_KEY_VARIABLES,
    AppArgs,
    ServerArgs,
    key_of_environment,
    split_args,
    words,
)

ONE_MORE = 1
"""``max_surge_percent``, which Serve rounds up: in an update one comes before another one goes."""


def build_app(args: AppArgs) -> Application:  # type: ignore[valid-type]
    """``serve deploy``'s entry: a typed builder over flat settings (examples/serve_config.yaml).

    Raises:
        InvalidConfig: a setting that no engine can run with.
    """
    settings: dict[str, Any] = args.model_dump(exclude_unset=True)  # type: ignore[attr-defined]
    models = settings.pop("models", None)
    server, engine_args = split_args(settings)
    server = with_keys(server)
    if models is None:
        return bind_app(server, engine_args)
    return bind_models(server, engine_args, several_models(server, engine_args, models))


def with_keys(server: ServerArgs) -> ServerArgs:
    """The settings with the keys of the environment, where they name none."""
    if server.api_key is None and server.api_key_file is None:
        server = replace(server, api_key=key_of_environment())
    if server.admin_api_key is None:
        server = replace(server, admin_api_key=key_of_environment(ADMIN_KEY_VARIABLES))
    return server


def bind_app(server: ServerArgs, engine_args: EngineArgs) -> Application:
    """One model behind the OpenAI API: an ingress deployment over an engine deployment."""
    return bind_models(server, engine_args, [ModelArgs(server, engine_args)])


def bind_models(
    server: ServerArgs,
    engine_args: EngineArgs,
    models: Sequence[ModelArgs],
    options: Mapping[str, Any] | None = None,
) -> Application:
    """Models behind one OpenAI API: an ingress deployment over one of engines for each model.

    ``server`` and ``engine_args`` say what is not a model's own: keys, quotas, logs. ``options``
    are of Serve, for the ingress.
    """
    ingress_class: Any = IngressDeployment  # Ray's stubs lose what @serve.deployment adds
    engines = [bind_engines(model) for model in models]
    prefill = [bind_engines(m, prefill=True) for m in models if m.server.prefill_engines]
    usual: dict[str, Any] = {
        "num_replicas": server.ingress_replicas,
        "max_surge_percent": ONE_MORE,
        "graceful_shutdown_timeout_s": max(server.shutdown_timeout, INGRESS_DRAIN_SECONDS),
    }
    ingress = ingress_class.options(**serve_logs(engine_args), **(usual | dict(options or {})))
    # It imports transformers, which the command has no use for until Ray has started.
    from rayfin.actors.media.kinds import model_media

    if server.max_body_bytes == MAX_BODY_BYTES and any(
        model.engine.enable_prompt_embeds or model_media(located(model.engine)) is not None
        for model in models
    ):
        server = replace(server, max_body_bytes=MAX_MEDIA_BODY_BYTES)
    named = {plugin: None for model in models for plugin in model.engine.plugin or ()}
    # It holds the keys' digests: the keys themselves stay here.
    edge = replace(edge_settings(server), plugins=tuple(named))
    admin = None
    if server.admin_port is not None:
        # Here, for it imports routes, as the next two do.
        from rayfin.deployments.serve.admin_port import admin_deployment

        admin = admin_deployment(
            server.admin_host,
            server.admin_port,
            *(server.admin_keys(), server.api_keys()),
            [(model.names, model.deployment, model.shown(), model.engine) for model in models],
        )
    keeper = None
    if server.ingress_replicas > 1:
        from rayfin.deployments.serve.response_store import ResponseStoreDeployment

        keeper_class: Any = ResponseStoreDeployment
        keeper = keeper_class.bind(server.response_dir)
    ingress_models = [
        replace(model, server=for_ingresses(model.server), from_zero=model.server.min_engines == 0)
        for model in models
    ]
    batches = None
    if server.batch_dir is not None:
        from rayfin.deployments.serve.batch_worker import BatchDeployment, concurrency

        batch_class: Any = BatchDeployment
        batches = batch_class.options(**serve_logs(engine_args)).bind(
            *(for_ingresses(server), ingress_models, engines),
            *(reply_settings(server), concurrency(server, models)),
        )
    app: Application = ingress.bind(
        for_ingresses(server), ingress_models, edge, engines, keeper, admin, batches, prefill
    )
    return app


def bind_engines(model: ModelArgs, *, prefill: bool = False) -> Application:
    """The engines of one model, or those that ``prefill`` for them.

    They get its ``shutdown_timeout`` to finish when they must go.
    """
    server, name = model.server, model.deployments[prefill]
    server.adapter_flags().reach()
    drain = server.shutdown_timeout
    engine_class: Any = EngineDeployment
    if prefill:
        limit = server.max_prefill_engines
        number = engine_numbers(server.prefill_engines, limit, server.idle_timeout)
    else:
        number = number_of_engines(server)
    # The autoscaler's number is not known here; more engines than these start one by one.
    least = number["num_replicas"] or (0 if prefill else server.min_engines) or 0
    if "autoscaling_config" in number and not prefill:
        number["autoscaling_config"] |= model.autoscaling
    usual = {
        "name": name,
        "max_surge_percent": ONE_MORE if has_room(model.engine, name, least) else 0,
        "graceful_shutdown_timeout_s": HANDOVER_SECONDS + drain + ENGINE_STOP_SECONDS,
    }
    options = serve_logs(model.engine) | number | usual | dict(model.options)
    settings = (server.batch_scale, model.ongoing_requests, model.deployment if prefill else "")
    bound: Application = engine_class.options(**options).bind(
        shipped(model.engine), drain, *settings
    )
    return bound


def for_ingresses(server: ServerArgs) -> ServerArgs:
    """Without keys, and without what others have to know."""
    secrets: dict[str, Any] = dict.fromkeys(SECRETS)
    counts = ("min_engines", "max_engines", "max_prefill_engines", "admin_port")
    others: dict[str, Any] = dict.fromkeys(counts)
    return replace(server, **secrets, **others, data_parallel_size=1, prefill_engines=0)


def privileged(tenants: list[str] | None) -> frozenset[str] | None:
    """The tenants who may set a priority; None is everybody."""
    return None if tenants is None else frozenset(words(tenants, "priority_tenants"))


def number_of_engines(server: ServerArgs) -> dict[str, Any]:
    """Deployment options: so many engines, or as many as the work wants."""
    least = server.data_parallel_size if server.min_engines is None else server.min_engines
    return engine_numbers(least, server.max_engines, server.idle_timeout)


def engine_numbers(least: int, limit: int | None, idle_seconds: float) -> dict[str, Any]:
    """The same, of two numbers of which the second may be none."""
    if limit is None:
        return {"num_replicas": least}
    config = autoscaling(least, limit, idle_seconds)
    return {"num_replicas": None, "autoscaling_config": config}


def serve_logs(args: EngineArgs) -> dict[str, Any]:
    """Deployment options: Serve's own log, its access log among it, in JSON as Rayfin's."""
    if args.log_format == "text":
        return {}
    return {"logging_config": {"encoding": "JSON", "log_level": args.log_level.upper()}}


def edge_settings(server: ServerArgs) -> HttpSettings:
    """What stands between a socket and a route.

    Raises:
        InvalidConfig: keys, or a list of words, that are none.
    """
    uploads = None
    if server.batch_dir is not None:
        from rayfin.deployments.batches.routes import FORM_BYTES

        uploads = server.max_file_bytes + FORM_BYTES
    cors = Cors(
        origins=words(server.allowed_origins, "allowed_origins"),
        methods=words(server.allowed_methods, "allowed_methods") or ("*",),
        headers=words(server.allowed_headers, "allowed_headers") or ("*",),
        credentials=server.allow_credentials,
    )
    return HttpSettings(
        keys=server.api_keys(),
        admin_keys=server.admin_keys() if server.admin_port is None else None,
        cors=cors,
        max_body_bytes=server.max_body_bytes,
        docs=server.enable_docs,
        priority_tenants=privileged(server.priority_tenants),
        web=server.ui,
        root_path=server.root_path or "",
        middleware=tuple(server.middleware or ()),
        tokenizer_info=server.enable_tokenizer_info_endpoint,
        log_error_stack=server.log_error_stack,
        client_adapters=os.environ.get(CLIENTS_MAY_LOAD) == "1",
        max_upload_bytes=uploads,
        max_recording_bytes=server.max_audio_upload_bytes + RECORDING_FORM_BYTES,
    )


def has_room(args: EngineArgs, deployment: str, wanted: int) -> bool:
    """Whether an update of a deployment may start an engine before an old one goes.

    That needs room for one engine beside the running ones, and for each one that they are fewer
    than ``wanted``: Serve starts those together, and stops no old engine until all are ready. True
    where there is no cluster.

    By sums over all nodes. Where the free devices of a model's group lie on different nodes the
    answer is wrong, and an engine that is started waits for its place.
    """
    if not ray.is_initialized():
        return True
    needed = bundles(replace(args, device=pick_cluster_device(args.device)))
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    engines = max(wanted - running_engines(deployment), 0) + 1
    return all(
        free.get(kind, 0.0) >= engines * sum(each[kind] for each in needed) for kind in needed[0]
    )


def running_engines(deployment: str) -> int:
    """The engines of a deployment; the fewest where several applications have one of its name.

    An application does not know its own name while it is built.
    """
    numbers = [
        application.deployments[deployment].replica_states.get("RUNNING", 0)  # type: ignore[call-overload]
        for application in serve.status().applications.values()
        if deployment in application.deployments
    ]
    return min(numbers, default=0)
