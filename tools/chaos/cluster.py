"""A Ray cluster of several nodes on one machine that runs Rayfin, to be broken.

Every raylet, GCS and Redis is a child of this process and known by its id. Processes are never
looked up by name.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.state import actors as actor_table
from ray.serve.schema import ProxyStatus

from rayfin.actors.config import EngineArgs
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.processes.environment import ENVIRONMENT
from rayfin.actors.processes.registry import runner_name
from rayfin.deployments.app import bind_app
from rayfin.deployments.serve.preflight import DEMO_FOLDER
from rayfin.deployments.serve.server_args import ServerArgs

APP = "chaos"
NAMESPACE = "rayfin"
PATIENCE = 120.0
FRESH_SECONDS = 10.0  # to wait for current metrics
NODE_TRIES = 3
PLACEMENTS = 4  # of an application on nodes
WORKER = Path(__file__).parent / "worker"
SOURCE = Path(__file__).parents[2] / "src"
FAKES = Path(__file__).parents[2] / "tests" / "support"
CLASSES = {
    "runner": "ModelRunnerActor",
    "scheduler": "SchedulerActor",
    "ingress": f"ServeReplica:{APP}:ingress",
    "engine": f"ServeReplica:{APP}:engine",
    "registry": "AdapterRegistry",
    "controller": "ServeController",
    "proxy": "ProxyActor",
    "batches": f"ServeReplica:{APP}:batches",
}
"""Kinds of actors -> the names of their classes in Ray's table."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Layout:
    """The cluster that a case needs. Cases with equal layouts share one."""

    engines: int = 1
    prefill: int = 0  # further engines that compute prompts for these
    spare: int = 0  # room for this many more engines
    ranks: int = 1  # tensor-parallel runners per engine
    ingresses: int = 1
    workers: int = 0  # nodes besides the head
    driver_apart: bool = False  # this process connects to the last worker's node, not to the head
    runner: str = "hash"  # or "model": the demo model, or a similar one for ranks or images;
    # or "script": the words of coding_agents.py
    redis: bool = False  # GCS fault tolerance
    batches: bool = False  # /v1/files and /v1/batches, on a folder of the cluster's
    pages: int | None = None  # in an engine's cache
    adapters: int = 0  # LoRA adapters
    images: bool = False  # the model is one that reads images
    engine: tuple[tuple[str, Any], ...] = ()  # further engine arguments
    server: tuple[tuple[str, Any], ...] = ()  # further server arguments
    variables: tuple[tuple[str, str], ...] = ()  # environment of all processes
    temp_bytes: int | None = None  # size of the file system with Ray's folder
    object_store: int = 100 * 1024**2

    @property
    def all_engines(self) -> int:
        """Those that prefill for others among them."""
        return self.engines + self.prefill


class Unavailable(RuntimeError):
    """A case cannot run on this machine."""


class Cluster:
    """A running layout. ``close`` ends everything that it started."""

    def __init__(self, layout: Layout, folder: str) -> None:
        self.layout = layout
        self.folder = folder
        self.failpoints = Path(self.folder, "failpoints")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = "demo"  # served name
        self.weights = "demo"  # folder or name
        self.adapters: dict[str, str] = {}  # folders by name
        self.redis: subprocess.Popen[bytes] | None = None
        self.nodes: list[Node] = []  # the head first
        self.ray_folder = ""  # of this start's sessions
        self._mounted = False

    def start(self) -> None:
        """Starts the cluster and deploys the application; returns when it accepts requests.

        Raises:
            Unavailable: this machine lacks what the layout needs.
        """
        layout = self.layout
        ray_folder = self.ray_folder = tempfile.mkdtemp(prefix="r", dir=self.folder)
        if layout.temp_bytes is not None:
            self._mount(ray_folder, layout.temp_bytes)
        redis_port = self._start_redis() if layout.redis else None
        runners = layout.all_engines * layout.ranks
        cpus = runners + layout.spare * layout.ranks if not layout.workers else 0
        if layout.ranks > 1:
            import ranked_model  # imports torch

            self.weights = str(Path(self.folder, "ranked"))
            ranked_model.make(Path(self.weights))
        if layout.runner == "script":
            import coding_agents

            self.weights = str(Path(self.folder, "scripted"))
            coding_agents.make_model(Path(self.weights))
        if layout.images:
            import image_model

            self.weights = str(Path(self.folder, "images"))
            image_model.make(Path(self.weights))
        if layout.adapters:
            import adapter_files

            names = [f"adapter-{number}" for number in range(layout.adapters)]
            self.adapters = adapter_files.make(
                str(DEMO_FOLDER), Path(self.folder, "adapters"), names
            )
        self.add_node(ray_folder, cpus, redis_port)
        for _ in range(layout.workers):
            if layout.driver_apart:  # Ray finds a driver's node by its folder
                ray_folder = tempfile.mkdtemp(prefix="r", dir=self.folder)
            # The others suffice if one is lost. Engines ask for a hundredth of a core each, too.
            self.add_node(ray_folder, runners + 1)
        ray.init(
            address=self.nodes[0].gcs_address,
            namespace="chaos",
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=ray_folder if layout.driver_apart else None,
        )
        serve.start(
            proxy_location="EveryNode" if layout.workers else "HeadOnly",
            http_options={"host": "127.0.0.1", "port": self.port},
        )
        self.deploy()
        if layout.workers and layout.ingresses > 1:
            self._spread()

    def deploy(self, engines: int | None = None, **settings: Any) -> None:
        """Deploys or redeploys the application.

        Args:
            engines: number of engines; default: the layout's.
            settings: further engine arguments.
        """
        layout = self.layout
        engine: dict[str, Any] = {"model": self.weights, "threads": 1, **dict(layout.engine)}
        server: dict[str, Any] = {"ingress_replicas": layout.ingresses, **dict(layout.server)}
        server.setdefault("served_model_name", self.model)
        if layout.batches:
            server["batch_dir"] = str(Path(self.folder, "batches"))
        if self.adapters:
            server["lora_modules"] = [f"{name}={path}" for name, path in self.adapters.items()]
            engine["enable_lora"] = True
        if (number := engines or layout.engines) > 1:
            server["data_parallel_size"] = number
        server["prefill_engines"] = layout.prefill
        engine.setdefault("tensor_parallel_size", layout.ranks)
        engine.setdefault("spare_runners", 0)  # a row kills runners, and means one that serves
        if layout.runner == "hash":  # its pages are no tensors, which peers could read
            engine["kv_peers"] = False
        per_page = 16 * 1024 if layout.runner == "model" else 1024
        engine.setdefault("kv_cache_memory", (layout.pages or 4096) * per_page)
        app = bind_app(ServerArgs(**server), EngineArgs(**engine | settings))
        serve.run(app, name=APP, route_prefix="/")

    def _spread(self) -> None:
        """Deploys again until ingresses run on several nodes, of which Serve makes no promise.

        Raises:
            Unavailable: they do not.
        """
        for _ in range(PLACEMENTS):
            if len(set(self.nodes_of("ingress"))) > 1:
                return
            serve.delete(APP)
            self.deploy()
        raise Unavailable("Serve puts all ingresses on one node")

    def add_node(self, folder: str, cpus: int, redis_port: int | None = None) -> Node:
        """Starts a node; the first one is the head, with the GCS."""
        head = not self.nodes
        params = RayParams(
            num_cpus=cpus,
            num_gpus=0,
            object_store_memory=self.layout.object_store,
            min_worker_port=0,
            max_worker_port=0,
            temp_dir=folder,
            include_dashboard=False,
            include_log_monitor=False,
            node_manager_port=0,
            dashboard_agent_listen_port=None,
            redis_address=None if redis_port is None else f"127.0.0.1:{redis_port}",
            gcs_address=None if head else self.nodes[0].gcs_address,
        )
        for tries in range(NODE_TRIES):
            try:
                node = Node(params, head=head, shutdown_at_exit=False, spawn_reaper=False)
                break
            except Exception as error:  # a busy machine can exceed the 30 s that Ray's agent has
                if head or tries == NODE_TRIES - 1:
                    raise Unavailable(f"a Ray node did not start ({error})"[:80]) from error
        self.nodes.append(node)
        return node

    def close(self) -> None:
        """Ends everything, including stopped processes."""
        pids = [row["Pid"] for row in self._table()] if ray.is_initialized() else []
        for pid in filter(None, pids):
            with suppressed():
                os.kill(pid, signal.SIGCONT)
        with suppressed():
            ray.shutdown()
        for node in reversed(self.nodes):
            with suppressed():
                node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        for pid in filter(None, pids):  # orphans of a dead raylet
            with suppressed():
                if belongs_to(pid, self.folder):
                    os.kill(pid, signal.SIGKILL)
        if self.redis is not None:
            self.redis.kill()
            self.redis.wait()
        if self._mounted:
            subprocess.run(["umount", "-l", self.ray_folder], check=False)

    def pids(self, what: str) -> list[int]:
        """Process ids of the living actors of a kind (a key of CLASSES)."""
        return [row["Pid"] for row in self._table(CLASSES[what]) if row["Pid"]]

    def serving(self) -> list[int]:
        """Process ids of the runners that serve; the others of their kind are spares."""
        asked = [scheduler.runners.remote() for scheduler in self.schedulers()]
        return [process.pid for each in ray.get(asked, timeout=30) for process in each]

    def engine(self) -> list[int]:
        """Process ids of one engine: its scheduler and its runners."""
        name = self._table(CLASSES["scheduler"])[0]["Name"]
        rows = self._table(CLASSES["scheduler"]) + self._table(CLASSES["runner"])
        names = [name, *(runner_name(name, rank) for rank in range(self.layout.ranks))]
        return [row["Pid"] for row in rows if row["Name"] in names and row["Pid"]]

    def nodes_of(self, what: str) -> list[str]:
        """Ids of the nodes on which actors of a kind run."""
        return [row["Address"]["NodeID"] for row in self._table(CLASSES[what])]

    def living_nodes(self) -> int:
        """Number of living nodes in the GCS."""
        return sum(node["Alive"] for node in ray.nodes())

    def workers_of(self, node: Node) -> list[int]:
        """Process ids of the living actors of a node."""
        node_id = node.node_id
        rows = [row for row in self._table() if row["Address"]["NodeID"] == node_id]
        return [row["Pid"] for row in rows if row["Pid"]]

    def plant(self, text: str) -> None:
        """Sets all processes' failpoints (actors/failpoints.py); an empty text clears them."""
        fresh = self.failpoints.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self.failpoints)

    def lose_calls(self) -> None:
        """Makes Ray fail calls, as CHAOS_RPC says, in processes that start from now on."""
        Path(self.folder, "rpc").touch()

    def loses_calls(self, pid: int) -> bool:
        """Whether a process fails calls."""
        return Path(self.folder, f"rpc-{pid}").exists()

    def engines(self) -> dict[str, Any]:
        """Handles of the engines' schedulers, by name."""
        names = [row["Name"] for row in self._table(CLASSES["scheduler"])]
        names = [name for name in names if name.startswith(APP)]
        return {name: ray.get_actor(name, namespace=NAMESPACE) for name in names}

    def schedulers(self) -> list[Any]:
        """The same without names."""
        return list(self.engines().values())

    def stats(self) -> list[EngineStats]:
        """Statistics of the engines that answer."""
        stats: list[EngineStats] = []
        for scheduler in self.schedulers():
            with suppressed():
                stats.append(ray.get(scheduler.stats.remote(), timeout=10))
        return stats

    def pages_left(self, seconds: float = PATIENCE) -> int:
        """Pages that idle engines still hold; -1 if they do not become idle or do not answer."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            stats = self.stats()
            if len(stats) == self.layout.all_engines and not any(
                s.running + s.waiting for s in stats
            ):
                held = sum(each.pages_held for each in stats)
                if not held:
                    for scheduler in self.schedulers():
                        ray.get(scheduler.check_integrity.remote(), timeout=30)
                    return 0
            time.sleep(0.2)
        return sum(each.pages_held for each in self.stats()) or -1

    def samples(self) -> dict[str, float]:
        """Values of /metrics by name or name/reason, summed over engines.

        They are current unless an engine does not report within ``FRESH_SECONDS``.
        """
        start = time.time()
        while True:
            text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
            samples: dict[str, float] = {}
            oldest = start
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.endswith("_reported_timestamp_seconds"):
                        oldest = min(oldest, sample.value)
                    elif "le" not in sample.labels:
                        reason = sample.labels.get("finished_reason")
                        name = f"{sample.name}/{reason}" if reason else sample.name
                        samples[name] = samples.get(name, 0.0) + sample.value
            if oldest >= start or time.time() > start + FRESH_SECONDS:
                return samples
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Whether all engines and the API answer, proxies listen, and spares are ready."""
        with suppressed():
            health = httpx.get(f"{self.url}/health", timeout=5).status_code == 200
            stats, spares = self.stats(), dict(self.layout.engine).get("spare_runners", 0)
            ready = all(each.spare_runners >= spares for each in stats)
            return health and ready and len(stats) == self.layout.all_engines and self._listens()
        return False

    def _listens(self) -> bool:
        """Whether proxies have started, and not only the head's where there are more nodes."""
        states = list(serve.status().proxies.values())
        waiting = {ProxyStatus.STARTING, ProxyStatus.UNHEALTHY} & set(states)
        return not waiting and states.count(ProxyStatus.HEALTHY) > bool(self.layout.workers)

    def wait_healthy(self, seconds: float = PATIENCE) -> None:
        eventually(self.healthy, "it is healthy", seconds)

    def _table(self, kind: str | None = None) -> list[dict[str, Any]]:
        rows = actor_table(actor_state_name="ALIVE").values()
        return [row for row in rows if kind is None or row["ActorClassName"] == kind]

    def _mount(self, folder: str, size: int) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            raise Unavailable("mounting a small file system is not permitted")
        self._mounted = True

    def _start_redis(self) -> int:
        """Starts $REDIS_SERVER, or redis-server from the path (Debian: redis-server)."""
        program = os.environ.get("REDIS_SERVER") or shutil.which("redis-server")
        if program is None:
            raise Unavailable("redis-server is not on the path, and REDIS_SERVER is unset")
        port = free_port()
        options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        self.redis = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)
        eventually(lambda: listens(port), "Redis listens", 20)
        return port


def environment(layout: Layout, folder: str) -> dict[str, str]:
    """The environment that a process needs before it imports ray to run a Cluster."""
    python_path = [str(WORKER), str(SOURCE), str(FAKES), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **ENVIRONMENT,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_TMPDIR": folder,  # keeps Ray's record of the last cluster apart from others
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAYFIN_FAILPOINTS": f"@{folder}/failpoints",
        "CHAOS_RUNNER": layout.runner,
        "PYTHONPATH": os.pathsep.join(filter(None, python_path)),
        "OMP_NUM_THREADS": "1",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "rayfin.deployments.edge.proxy.middlewares",
        **dict(layout.variables),
    }


@contextmanager
def suppressed() -> Iterator[None]:
    """Suppresses the errors of a broken cluster."""
    try:
        yield
    except Exception:
        return


def eventually(probe: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
    """Waits for a truthy result of ``probe`` and returns it.

    Raises:
        TimeoutError: there is none in time.
    """
    deadline = time.monotonic() + seconds
    while not (answer := probe()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"never happened: {what}")
        time.sleep(0.1)
    return answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def belongs_to(pid: int, folder: str) -> bool:
    """Whether a process was started with the cluster's folder in its environment."""
    try:
        return f"RAY_TMPDIR={folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
