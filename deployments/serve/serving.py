"""``rayfin serve``: one command from nothing to an address, and back to nothing."""

import logging
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import ray
from ray import serve as ray_serve
from ray.exceptions import RayActorError
from ray.serve.schema import ApplicationStatus

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, InvalidConfig, RayfinError
from rayfin.actors.processes.own_ray import start_ray
from rayfin.actors.supervision.ahead import EngineAhead
from rayfin.actors.timing import SIGNAL_REPEATS, START_POLL_SECONDS
from rayfin.deployments.app import bind_models
from rayfin.deployments.client.engine_names import engine_prefix
from rayfin.deployments.edge.door import PLAIN, Door
from rayfin.deployments.edge.middleware import check_middleware
from rayfin.deployments.edge.proxy import CALLBACK, CALLBACK_PATH
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.ports import require_free, require_own_ports, require_ports
from rayfin.deployments.serve.preflight import (
    InBackground,
    check_model,
    located,
    require_files,
    require_hub,
    require_room,
)
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.serve.startup import (
    StartUp,
    engine_info,
    loading,
    progress,
    sought,
    summary,
)

OBJECT_STORE_BYTES = (
    256 * 1024**2
)  # steps travel inside calls; the object store stays all but empty
RAISED = re.compile(r"rayfin\.actors\.errors\.(\w+): (.+)")


class StopSignals:
    """SIGINT and SIGTERM interrupt what runs: the first stops in order, the next at once.

    Those that repeat the first within a second are one with it: a supervisor's own, and the one
    that it sends to the whole group.
    """

    def __init__(self) -> None:
        self.count = 0
        self._first = 0.0

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.count and now - self._first < SIGNAL_REPEATS:
            return
        self._first = self._first or now
        self.count += 1
        raise KeyboardInterrupt


def serve(
    server: ServerArgs,
    engine: EngineArgs,
    *,
    host: str,
    port: int,
    name: str = "rayfin",
    verbose: bool = False,
    models: Sequence[ModelArgs] = (),
    door: Door = PLAIN,
) -> int:
    """Serves a model until Ctrl-C or SIGTERM; joins a running Ray cluster or starts a local one.

    Or several ``models``, to which ``server`` and ``engine`` say what they have in common.

    Stops what it started, and nothing else: the application, Serve if it was not there, Ray if it
    was not there.

    Returns:
        The exit status, 0 after an orderly stop, also of one that was still loading.

    Raises:
        InvalidConfig: the port is taken, the name is taken, or the model cannot be served.
        EngineUnavailable: the cluster cannot run it.
        KeyboardInterrupt: a second Ctrl-C or SIGTERM cut the stop short.
    """
    models = models or [ModelArgs(server, engine)]
    stop = StopSignals()
    stop.install()
    try:
        require_ports(server, host, port, door)
        check_middleware(server.middleware or ())
        for model in models:
            require_files(model.engine)
        if what := sought(models):
            with StartUp().stage(f"Looking up {what}", announced=True):
                for model in models:
                    require_hub(model.engine)
        # It imports torch and transformers, which takes as long as a Ray takes to start.
        checks = InBackground(lambda: _check(models))
        door.tell_proxies()
        _serve(server, engine, models, (host, port, door), name, verbose, stop, checks)
    except KeyboardInterrupt:
        if stop.count != 1:
            raise
    finally:
        door.close()
    print("Stopped.", flush=True)
    return 0


def _check(models: Sequence[ModelArgs]) -> None:
    for model in models:
        check_model(model.engine)


def _serve(
    server: ServerArgs,
    engine: EngineArgs,
    models: Sequence[ModelArgs],
    address: tuple[str, int, Door],
    name: str,
    verbose: bool,
    stop: StopSignals,
    checks: InBackground,
) -> None:
    """Serves until the first signal, and stops all that it started."""
    start_up = StartUp()
    with ExitStack() as held:
        ours = held.enter_context(_cluster(verbose, start_up))
        if ours:  # the head node is here, and no other will come
            require_own_ports(server)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            require_room(models, resources["CPU"])
        # From here on: Ray has set a SIGTERM handler that aborts, and a shell script starts what it
        # puts in the background with SIGINT ignored.
        stop.install()
        if not ours:
            held.enter_context(_serve_instance(*address))
            if name in ray_serve.status().applications:
                raise InvalidConfig(f"an application {name!r} runs on this cluster already", "name")
        _await(checks, models, start_up)
        application = bind_models(server, engine, models)  # sees a cluster without engines
        if ours:
            ahead = [_engine_ahead(name, own) for own in models if _has_one_engine(own.server)]
            proxies = _start_serve(*address)
            for own in ahead:
                own.await_scheduler()
        try:
            what = loading(models)
            with start_up.stage(f"Loading {what}", partial(progress, name), announced=True) as done:
                if ours:
                    _deploy_beside(proxies, application, name)
                else:
                    _deploy(application, name)
                done(f"Loaded {what}")
            infos = [engine_info(name, own) for own in models]
            start_up.summary(*summary(models, *address, infos))
            _wait_for_signal()
            print("Stopping: running requests finish first (Ctrl-C again: at once).", flush=True)
        finally:
            ray_serve.delete(name)


def _engine_ahead(app: str, model: ModelArgs) -> EngineAhead:
    """Starts a model's engine now: Serve takes seconds to start what will watch it."""
    return EngineAhead(located(model.engine), engine_prefix(app, model.deployment))


def _has_one_engine(server: ServerArgs) -> bool:
    """Whether there is exactly one from the start on: several start side by side anyway."""
    return server.data_parallel_size == 1 and server.max_engines is None


def _await(checks: InBackground, models: Sequence[ModelArgs], start_up: StartUp) -> None:
    """Waits for the checks, and says what for where that may take long."""
    what = sought(models)
    if not what or checks.done:
        checks.result()
        return
    with start_up.stage(f"Looking for {what}", announced=True) as done:
        checks.result()
        done(f"Found {what}")


@contextmanager
def _cluster(verbose: bool, start_up: StartUp) -> Iterator[bool]:
    """A Ray cluster: RAY_ADDRESS' or ``ray start``'s, left alone afterwards, or a new local one.

    Yields whether it is ours.
    """
    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray.serve").setLevel(level)
    output: dict[str, Any] = {"log_to_driver": verbose, "logging_level": level}
    os.environ.setdefault(CALLBACK, CALLBACK_PATH)  # what a new Ray's processes inherit
    with start_up.stage("Starting Ray") as done:
        try:
            start_ray(object_store_memory=OBJECT_STORE_BYTES, **output)
            ours = True
            done("Started a local Ray")
        except ValueError:  # Ray's answer to resources for a cluster that runs already: join it
            ray.init(**output)
            ours = False
            done(f"Joined the Ray cluster at {ray.get_runtime_context().gcs_address}")
    try:
        yield ours
    finally:
        ray.shutdown()


def _start_serve(host: str, port: int, door: Door) -> InBackground:
    """Starts Ray Serve on a Ray of our own, with which it goes down.

    Returns when it takes applications. Its proxy starts meanwhile, as long as the result is waited
    for (:func:`_deploy_beside`).
    """
    if door.uds is None:
        require_free(host, port, "port")
    proxies = InBackground(partial(_start_proxies, host, port, door))
    while not proxies.done and _serve_port() is None:
        time.sleep(START_POLL_SECONDS)
    if proxies.done:
        proxies.result()
    return proxies


@contextmanager
def _serve_instance(host: str, port: int, door: Door) -> Iterator[None]:
    """The Serve of a cluster on ``port``: the one that runs, if it listens there, or a new one."""
    door.require_own_ray()
    running = _serve_port()
    if running is not None:
        if door != PLAIN:
            raise InvalidConfig("ssl_certfile: Ray Serve runs on this cluster already", "port")
        if running != port:
            raise InvalidConfig(
                f"Ray Serve runs on this cluster already, on port {running}, not {port}", "port"
            )
        yield
        return
    if door.uds is None:
        require_free(host, port, "port")
    try:
        _start_proxies(host, port, door)
        yield
    finally:
        ray_serve.shutdown()  # type: ignore[no-untyped-call]


def _start_proxies(host: str, port: int, door: Door) -> None:
    """Starts Ray Serve, and waits for its proxies.

    On a slow machine Serve may replace a proxy that takes long to start: then the deployment waits
    for the next one.
    """
    try:
        ray_serve.start(http_options=door.http_options(host, port))
    except RayActorError as error:
        if "ray.kill" not in str(error):  # it ended by itself: on a port that is taken, for example
            raise


def _deploy(application: ray_serve.Application, name: str) -> None:
    """Deploys and waits until requests can come.

    Raises:
        RayfinError: the deployment's own error, if it was one of Rayfin's.
    """
    try:
        ray_serve.run(application, name=name, route_prefix="/")
    except RuntimeError as error:
        raise _reason("\n".join([str(error), *_deployment_messages(name)])) from None
    if ray_serve.status().applications[name].status is not ApplicationStatus.RUNNING:
        raise EngineUnavailable(f"the application {name} did not start")


def _deploy_beside(proxies: InBackground, application: ray_serve.Application, name: str) -> None:
    """Deploys while the proxies start, and waits for both.

    Raises:
        Exception: of the proxies if they have failed, for without them a deployment times out.
            Otherwise the deployment's.
    """
    try:
        _deploy(application, name)
    except Exception:
        if proxies.done:
            proxies.result()
        raise
    proxies.result()


def _deployment_messages(name: str) -> list[str]:
    """What the application's deployments say of themselves; a failed one quotes its traceback."""
    application = ray_serve.status().applications.get(name)
    deployments = application.deployments.values() if application is not None else ()
    return [deployment.message for deployment in deployments if deployment.message]


def _reason(text: str) -> RayfinError:
    """The error of Rayfin's inside Serve's report of a failed deployment."""
    found = RAISED.findall(text)
    if not found:
        last_line = next(line for line in reversed(text.splitlines()) if line.strip())
        return EngineUnavailable(f"the deployment failed: {last_line.strip()}")
    kind, message = found[-1]
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


def _wait_for_signal() -> None:
    """Sleeps until Ctrl-C or SIGTERM; the next one interrupts whatever is under way then."""
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return
