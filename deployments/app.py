"""The wiring of a Rayfin application, top to bottom: what ``serve deploy`` imports."""

from dataclasses import replace
from typing import Any

from ray.serve import Application

from rayfin.actors.config import EngineArgs
from rayfin.deployments.engine import EngineDeployment
from rayfin.deployments.ingress import IngressDeployment
from rayfin.deployments.models import model_path
from rayfin.deployments.server_args import AppArgs, ServerArgs, split_args

SHUTDOWN_SECONDS = 5.0  # what stopping an engine takes once it has drained


def build_app(args: AppArgs) -> Application:  # type: ignore[valid-type]
    """``serve deploy``'s entry: a typed builder over flat settings (examples/serve_config.yaml).

    Raises:
        InvalidConfig: a setting that no engine can run with.
    """
    return bind_app(*split_args(args.model_dump()))  # type: ignore[attr-defined]


def bind_app(server: ServerArgs, engine_args: EngineArgs) -> Application:
    """One model behind the OpenAI API: an ingress deployment over an engine deployment."""
    engine_class: Any = EngineDeployment  # Ray's stubs lose what @serve.deployment adds
    ingress_class: Any = IngressDeployment
    drain = server.shutdown_timeout
    engine = engine_class.options(graceful_shutdown_timeout_s=drain + SHUTDOWN_SECONDS).bind(
        replace(engine_args, model=model_path(engine_args.model)), drain
    )
    ingress = ingress_class.options(
        num_replicas=server.ingress_replicas, graceful_shutdown_timeout_s=drain
    )
    app: Application = ingress.bind(server, engine_args, engine)
    return app
