"""``rayfin serve``: one command from nothing to an address, and back to nothing.

It imports what starts Ray; Serve and the rest (``deployments/deploy.py``) while Ray starts.
"""

import logging
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from types import FrameType
from typing import Any

import ray

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import RayfinError
from rayfin.actors.processes.worker_forks import WorkerForks
from rayfin.actors.timing import SIGNAL_REPEATS
from rayfin.deployments.edge.forks import server_forks
from rayfin.deployments.edge.listen_options import PLAIN, ListenOptions
from rayfin.deployments.edge.middleware import check_middleware
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.ports import require_own_ports, require_ports
from rayfin.deployments.serve.preflight import (
    InBackground,
    check_audio,
    check_model,
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
    listen_options: ListenOptions = PLAIN,
    forks: WorkerForks | None = None,
) -> int:
    """Serves a model until Ctrl-C or SIGTERM; joins a running Ray cluster or starts a local one.

    Or several ``models``, to which ``server`` and ``engine`` say what they have in common.
    ``forks`` may have been started before Ray was imported.

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
        require_ports(server, host, port, listen_options)
        check_middleware(server.middleware or ())
        for model in models:
            require_files(model.engine)
        if what := sought(models):
            with StartUp().stage(f"Looking up {what}", announced=True):
                for model in models:
                    require_hub(model.engine)
        # What it imports takes as long as a Ray takes to start.
        checks = InBackground(lambda: _prepare(models))
        forks = forks or server_forks(listen_options)
        with forks or nullcontext():
            address = (host, port, listen_options)
            _serve(server, engine, models, address, name, verbose, stop, checks, forks)
    except KeyboardInterrupt:
        if stop.count != 1:
            raise
    finally:
        listen_options.close()
    print("Stopped.", flush=True)
    return 0


def _prepare(models: Sequence[ModelArgs]) -> None:
    """Checks the models, and imports what serves them."""
    for model in models:
        check_model(model.engine)
        check_audio(model.engine)
        model.server.adapter_flags().reach()
    import_module("rayfin.deployments.deploy")


def _serve(
    server: ServerArgs,
    engine: EngineArgs,
    models: Sequence[ModelArgs],
    address: tuple[str, int, ListenOptions],
    name: str,
    verbose: bool,
    stop: StopSignals,
    checks: InBackground,
    forks: WorkerForks | None,
) -> None:
    """Serves until the first signal, and stops all that it started."""
    start_up = StartUp()
    with ExitStack() as held:
        ours = held.enter_context(_cluster(verbose, start_up, forks))
        if ours:  # the head node is here, and no other will come
            require_own_ports(server)
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            require_room(models, resources["CPU"])
        # From here on: Ray has set a SIGTERM handler that aborts, and a shell script starts what it
        # puts in the background with SIGINT ignored.
        stop.install()
        from rayfin.deployments import deploy

        # Not before: Serve sets its own when it is imported.
        logging.getLogger("ray.serve").setLevel(_log_level(verbose))
        if not ours:
            held.enter_context(deploy.serve_instance(*address, name))
        _await(checks, models, start_up)
        start = deploy.start_on_own_ray if ours else deploy.start_on_serve
        finish = start(server, engine, models, address, name)
        orderly = True
        try:
            what = loading(models)
            with start_up.stage(f"Loading {what}", partial(progress, name), announced=True) as done:
                finish()
                done(f"Loaded {what}")
            infos = [engine_info(name, model) for model in models]
            start_up.summary(*summary(models, *address, infos))
            _wait_for_signal()
            print("Stopping: running requests finish first (Ctrl-C again: at once).", flush=True)
        except RayfinError:
            # No request is there to finish, and a Ray of ours takes along what still starts.
            orderly = not ours
            raise
        finally:
            if orderly:
                deploy.delete(name)


def _log_level(verbose: bool) -> int:
    return logging.INFO if verbose else logging.ERROR


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
def _cluster(verbose: bool, start_up: StartUp, forks: WorkerForks | None) -> Iterator[bool]:
    """A Ray cluster: RAY_ADDRESS' or ``ray start``'s, left alone afterwards, or a new local one.

    Yields whether it is ours.
    """
    output: dict[str, Any] = {"log_to_driver": verbose, "logging_level": _log_level(verbose)}
    with start_up.stage("Starting Ray") as done:
        try:
            with forks.for_new_ray() if forks is not None else nullcontext():
                ray.init(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **output)
            ours = True
            done("Started a local Ray")
        except ValueError:  # Ray's answer to resources for a cluster that runs already: join it
            if forks is not None:
                forks.close()
            ray.init(**output)
            ours = False
            done(f"Joined the Ray cluster at {ray.get_runtime_context().gcs_address}")
    try:
        yield ours
    finally:
        ray.shutdown()


def _wait_for_signal() -> None:
    """Sleeps until Ctrl-C or SIGTERM; the next one interrupts whatever is under way then."""
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        return
