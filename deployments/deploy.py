"""An application on Ray Serve: starts Serve, deploys, waits, and finds the reason of a failure.

``rayfin serve`` imports this, and all of Serve with it, while Ray starts.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from ray import serve as ray_serve
from ray.exceptions import RayActorError
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import RAISED, EngineUnavailable, InvalidConfig, RayfinError
from rayfin.actors.supervision.early_engine import EarlyEngine
from rayfin.actors.timing import START_POLL_SECONDS
from rayfin.deployments.app import bind_models
from rayfin.deployments.client.engine_names import engine_prefix
from rayfin.deployments.edge.listen_options import PLAIN, ListenOptions
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.ports import require_free
from rayfin.deployments.serve.preflight import InBackground, shipped
from rayfin.deployments.serve.server_args import ServerArgs

Address = tuple[str, int, ListenOptions]


def start_on_own_ray(
    server: ServerArgs,
    engine: EngineArgs,
    models: Sequence[ModelArgs],
    address: Address,
    name: str,
) -> Callable[[], None]:
    """Starts, side by side, all that needs no other: the engines and a Serve.

    Returns when Serve takes applications, while its proxy starts. It goes down with Ray.

    Returns:
        What deploys the application, and waits until requests can come (:func:`_deploy_beside`).
    """
    application = bind_models(server, engine, models)  # sees a cluster without engines
    ahead = [_engine_ahead(name, model) for model in models if _has_one_engine(model.server)]
    proxies = _start_serve(*address)
    for early_engine in ahead:
        early_engine.await_scheduler()
    return partial(_deploy_beside, proxies, ahead, application, name)


def start_on_serve(
    server: ServerArgs,
    engine: EngineArgs,
    models: Sequence[ModelArgs],
    address: Address,
    name: str,
) -> Callable[[], None]:
    """As :func:`start_on_own_ray`, on the Serve of a cluster (:func:`serve_instance`)."""
    return partial(_deploy_on, bind_models(server, engine, models), name)


def _engine_ahead(app: str, model: ModelArgs) -> EarlyEngine:
    """Starts a model's engine now: Serve takes seconds to start what will watch it."""
    return EarlyEngine(shipped(model.engine), engine_prefix(app, model.deployment))


def _has_one_engine(server: ServerArgs) -> bool:
    """Whether there is exactly one from the start on: several start side by side anyway."""
    return server.data_parallel_size == 1 and server.max_engines is None


def _start_serve(host: str, port: int, listen_options: ListenOptions) -> InBackground:
    """Starts Ray Serve on a Ray of our own; returns when it takes applications.

    Its proxy starts meanwhile, as long as the result is waited for (:func:`_deploy_beside`).
    """
    if listen_options.uds is None:
        require_free(host, port, "port")
    proxies = InBackground(partial(_start_proxies, host, port, listen_options))
    while not proxies.done and _serve_port() is None:
        time.sleep(START_POLL_SECONDS)
    if proxies.done:
        proxies.result()
    return proxies


@contextmanager
def serve_instance(
    host: str, port: int, listen_options: ListenOptions, name: str
) -> Iterator[None]:
    """The Serve of a cluster on ``port``: the one that runs, if it listens there, or a new one.

    Raises:
        InvalidConfig: it listens elsewhere, or has an application of that name.
    """
    listen_options.require_own_ray()
    running = _serve_port()
    if running is not None:
        if listen_options != PLAIN:
            raise InvalidConfig("ssl_certfile: Ray Serve runs on this cluster already", "port")
        if running != port:
            raise InvalidConfig(
                f"Ray Serve runs on this cluster already, on port {running}, not {port}", "port"
            )
        if name in ray_serve.status().applications:
            raise InvalidConfig(f"an application {name!r} runs on this cluster already", "name")
        yield
        return
    if listen_options.uds is None:
        require_free(host, port, "port")
    try:
        _start_proxies(host, port, listen_options)
        yield
    finally:
        ray_serve.shutdown()  # type: ignore[no-untyped-call]


def _start_proxies(host: str, port: int, listen_options: ListenOptions) -> None:
    """Starts Ray Serve, and waits for its proxies.

    On a slow machine Serve may replace a proxy that takes long to start: then the deployment waits
    for the next one.
    """
    try:
        ray_serve.start(http_options=listen_options.http_options(host, port))
    except RayActorError as error:
        if "ray.kill" not in str(error):  # it ended by itself: on a port that is taken, for example
            raise


def _deploy(
    application: ray_serve.Application, name: str, ahead: Sequence[EarlyEngine] = ()
) -> None:
    """Deploys and waits until the application runs.

    Raises:
        RayfinError: the deployment's own error, if it was one of Rayfin's. That of an engine of
            ``ahead`` which refuses its model is raised at once: Serve starts an engine several
            times before it gives up, and each start loads the model.
    """
    target = ray_serve.RunTarget(application, name=name, route_prefix="/")
    try:
        ray_serve.run_many([target], wait_for_applications_running=False)
        while (state := _state(name)).status is not ApplicationStatus.RUNNING:
            if state.status is ApplicationStatus.DEPLOY_FAILED:
                raise RuntimeError(state.message)
            for engine in ahead:
                if engine.refusal is not None:
                    raise engine.refusal
            time.sleep(START_POLL_SECONDS)
    except RuntimeError as error:
        raise _reason("\n".join([str(error), *_deployment_messages(name)])) from None


def _deploy_on(application: ray_serve.Application, name: str) -> None:
    """Deploys on a Serve that runs, and waits for its proxies."""
    _deploy(application, name)
    _await_proxies()


def _await_proxies() -> None:
    """Returns when all proxies have started, also one in the place of another that was too slow.

    Raises:
        TimeoutError: a proxy takes longer than Serve's own limit, a minute.
    """
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    client.wait_for_proxies_serving(wait_for_applications_running=True)


def _state(name: str) -> ApplicationStatusOverview:
    state = ray_serve.status().applications.get(name)
    if state is None:
        raise EngineUnavailable(f"the application {name} was deleted while it started")
    return state


def _deploy_beside(
    proxies: InBackground,
    ahead: Sequence[EarlyEngine],
    application: ray_serve.Application,
    name: str,
) -> None:
    """Deploys while the proxies start, and waits for both.

    Raises:
        Exception: of the proxies if they have failed, for without them a deployment times out.
            Otherwise the deployment's.
    """
    try:
        _deploy(application, name, ahead)
    except Exception:
        if proxies.done:
            proxies.result()
        raise
    proxies.result()
    _await_proxies()


def delete(name: str) -> None:
    """Takes the application down; running requests finish first."""
    ray_serve.delete(name)


def _deployment_messages(name: str) -> list[str]:
    """What the application's deployments say of themselves; a failed one quotes its traceback."""
    application = ray_serve.status().applications.get(name)
    deployments = application.deployments.values() if application is not None else ()
    return [deployment.message for deployment in deployments if deployment.message]


def _reason(text: str) -> RayfinError:
    """The error of Rayfin's inside Serve's report of a failed deployment."""
    errors = RAISED.findall(text)
    if not errors:
        last_line = next(line for line in reversed(text.splitlines()) if line.strip())
        return EngineUnavailable(f"the deployment failed: {last_line.strip()}")
    kind, message = errors[-1]
    return InvalidConfig(message) if kind != "EngineUnavailable" else EngineUnavailable(message)


def _serve_port() -> int | None:
    """The port of the Serve that runs on the cluster, None if there is none."""
    try:
        from ray.serve.context import _get_global_client

        client = _get_global_client(raise_if_no_controller_running=False)
    except Exception as error:  # Ray's own, whatever it is: no controller answers
        logging.getLogger(__name__).debug("no Serve found: %s", error)
        return None
    return None if client is None else int(client.http_config.port)
