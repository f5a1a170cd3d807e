"""The metrics hub of an application: a named actor that collects all counters.

    ingresses  ── Report ──►  hub  ──► its own HTTP port, text
               ◄── Ledger ──       ──► the text of any ingress' /metrics
    schedulers ◄── stats ───

It pulls from the schedulers every other second and at each scrape; they answer from a thread of
their own. A scrape waits for them for a moment only, and shows the last numbers of one that is too
busy. No request waits for the hub. It exits when no ingress reports any more.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ray
from ray.exceptions import RayError

from rayfin import __version__
from rayfin.actors.errors import EngineUnavailable
from rayfin.actors.metric import Family
from rayfin.actors.metrics.engine_stats import ENGINE_METRICS, engine_report
from rayfin.actors.metrics.ledger import INGRESSES, CounterReport, Ledger
from rayfin.actors.metrics.render import render
from rayfin.actors.processes.lifeline import Lifeline
from rayfin.actors.processes.registry import NAMESPACE, engine_names, find_actor
from rayfin.actors.timing import (
    HUB_IDLE_SECONDS,
    HUB_LEASE_SECONDS,
    HUB_PULL_ANSWER_SECONDS,
    HUB_PULL_SECONDS,
    HUB_SCRAPE_SECONDS,
    HUB_SILENT_SECONDS,
)

logger = logging.getLogger(__name__)

OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": 0,
    "max_concurrency": 16,
    "enable_task_events": False,
}
HEAD = "node:__internal_head__"
"""The resource of the cluster's head node: there Prometheus finds the hub's port."""


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Settings of one application's hub."""

    engines: str  # prefix of the names of its engines
    model_name: str
    alias: str | None = None
    port: int | None = None
    metrics: tuple[Family, ...] = ()  # that ingresses report


@ray.remote(**OPTIONS)
class MetricsHub:
    """Collects and renders. ``known`` is the ledger of the application's last hub."""

    def __init__(self, settings: HubSettings, known: Ledger) -> None:
        self._settings = settings
        self._ledger = known.copy(time.monotonic())
        self._lock = threading.Lock()  # of the ledger
        self._schedulers: dict[str, Any] = {}  # by label
        self._lifeline = Lifeline(HUB_LEASE_SECONDS, lambda: os._exit(0))
        self._lifeline.watch()
        self._listening = settings.port is None
        self._puller = Puller(self._pull, HUB_PULL_SECONDS)
        self._puller.start()
        threading.Thread(target=self._run, name="find", daemon=True).start()

    def report(self, report: CounterReport) -> Ledger:
        """Adds an ingress' counters; returns the totals of all."""
        self._apply(report)
        return self._copy()

    def scrape(self, report: CounterReport) -> bytes:
        """Adds an ingress' counters; returns the Prometheus text of all as of now."""
        self._apply(report)
        return self._fresh()

    def _listen(self) -> None:
        port = self._settings.port
        if self._listening or port is None:
            return
        try:
            listen(port, self._fresh)
            self._listening = True
        except OSError as error:  # another process has the port: retried
            logger.warning("metrics are not served on port %d: %s", port, error)

    def _apply(self, report: CounterReport) -> None:
        self._lifeline.heard()
        with self._lock:
            self._ledger.apply(report, time.monotonic())

    def _copy(self) -> Ledger:
        with self._lock:
            return self._ledger.copy()

    def _fresh(self) -> bytes:
        """Returns the text after a new pull, or without it if the pull takes long."""
        self._puller.refresh(HUB_SCRAPE_SECONDS)
        settings = self._settings
        metrics = (*ENGINE_METRICS, *settings.metrics)
        return render(settings.model_name, settings.alias, self._copy(), metrics)

    def _run(self) -> None:
        while True:
            self._listen()
            try:
                self._find()
            except Exception as error:  # any error of Ray: the registry is away
                logger.warning("cannot look for engines: %s", error)
            time.sleep(HUB_PULL_SECONDS)

    def _find(self) -> None:
        schedulers = {}
        for name in engine_names(self._settings.engines):
            if (scheduler := find_actor(name)) is not None:
                schedulers[name.rpartition("/")[2]] = scheduler
        self._schedulers = schedulers
        silent = time.monotonic() - HUB_SILENT_SECONDS
        with self._lock:
            for engine in self._ledger.engines:
                if engine not in schedulers:
                    self._ledger.drop_gauges(engine)
                self._ledger.drop_silent(engine, silent)
            self._ledger.drop_silent(INGRESSES, silent)

    def _pull(self) -> None:
        """Calls all schedulers at once; one that does not answer keeps its numbers."""
        if not self._schedulers:  # the hub is new, or all engines are
            self._find()
        at = time.time()
        calls = {scheduler.stats.remote(): engine for engine, scheduler in self._schedulers.items()}
        if not calls:
            return
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=HUB_PULL_ANSWER_SECONDS)
        for ref in ready:
            try:
                report = engine_report(calls[ref], ray.get(ref), at)
            except (RayError, EngineUnavailable):  # it has died, or is starting
                continue
            with self._lock:
                self._ledger.apply(report, time.monotonic())


def start_hub(app: str, settings: HubSettings, known: Ledger) -> Any:
    """Returns the application's hub; starts one from ``known`` if there is none.

    A hub with other settings or of another version, from before an update, does not count; it exits
    when its last ingress has gone.
    """
    digest = hashlib.sha256(repr((__version__, settings)).encode()).hexdigest()[:8]
    actor_class: Any = MetricsHub  # Ray's stubs lose `options` on a decorated class
    return actor_class.options(
        name=f"{app}/metrics/{digest}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        resources={HEAD: 0.001},
    ).remote(settings, known)


class Puller:
    """Calls ``pull`` every ``seconds`` and at each ``refresh``, never twice at once.

    A caller waits for its pull no longer than its patience. The pull continues, and serves all that
    called meanwhile.
    """

    def __init__(self, pull: Callable[[], None], seconds: float) -> None:
        self._pull = pull
        self._seconds = seconds
        self._changed = threading.Condition()
        self._wanted = False
        self._begun = self._done = 0  # pulls

    def start(self) -> None:
        threading.Thread(target=self._run, name="pull", daemon=True).start()

    def refresh(self, patience: float) -> bool:
        """Waits for a pull that begins after this call, for at most ``patience`` seconds.

        Returns:
            Whether it has finished.
        """
        with self._changed:
            number = self._begun + 1
            self._wanted = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= number, patience)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted, self._seconds)
                self._wanted = False
                self._begun += 1
            try:
                self._pull()
            except Exception as error:  # any error of Ray: the registry is away
                logger.warning("cannot ask the engines: %s", error)
            with self._changed:
                self._done = self._begun
                self._changed.notify_all()


# The hub's own HTTP port: the text of all metrics on any path.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def listen(port: int, text: Callable[[], bytes]) -> ThreadingHTTPServer:
    """Serves what ``text`` returns, uncompressed, in background threads.

    Raises:
        OSError: the port is in use.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = HUB_IDLE_SECONDS

        def do_GET(self) -> None:
            body = text()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Logs no scrapes."""

    server = ThreadingHTTPServer(("", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
