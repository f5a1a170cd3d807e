"""One Ray cluster, one served model, and the same model in this process to compare with."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from rayfin import LLM, SamplingParams
from rayfin.actors.config import EngineArgs
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.deployments.app import bind_app, bind_models
from rayfin.deployments.client.engine_names import ENGINE, find_engine
from rayfin.deployments.edge.listen_options import CALLBACK, CALLBACK_PATH
from rayfin.deployments.serve.model_args import several_models
from rayfin.deployments.serve.server_args import ServerArgs

PATIENCE = 600.0  # seconds; only a failure waits so long
PORTS = range(20_000, 32_000)  # above those of Ray's workers, below those that Linux gives
MODEL = "demo"
APP = "e2e"
SITE = f"site-{os.getpid()}"  # its processes are killed by name: no other cluster's
ADMIN_KEY = "operator"
REPORTED = "_reported_timestamp_seconds"
SERVE_DRIVER = """
import sys
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import RayfinError
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.serve.serving import serve

engine = EngineArgs(model=sys.argv[1], threads=1, kv_cache_memory=64 * 1024**2)
try:
    sys.exit(serve(ServerArgs(), engine, host="127.0.0.1", port=int(sys.argv[2])))
except RayfinError as error:
    print(f"error: {type(error).__name__}: {error}")
    sys.exit(2)
"""
SETTINGS: dict[str, Any] = {
    "model": MODEL,
    "threads": 1,
    "kv_cache_memory": 64 * 1024**2,
    "spare_runners": 0,  # each is a process more; test_spare_runners.py has one
}

T = TypeVar("T")
Held = dict[str, tuple[int, int]]  # actor -> its open files, its unfinished tasks


def _eventually(
    probe: Callable[[], T | None],
    what: str,
    seconds: float = PATIENCE,
    seen: Callable[[], str] = str,
) -> T:
    """The first truthy answer of ``probe``; a failure says what was ``seen`` instead."""
    deadline = time.monotonic() + seconds
    while not (answer := probe()):
        assert time.monotonic() < deadline, f"never happened: {what}. {seen()}"
        time.sleep(0.05)
    return answer


def _free_port() -> int:
    """A port that no process gets by asking for any, as Ray's processes do all the time."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model of an application over HTTP, and the engine behind it."""

    name: str
    url: str
    model: str
    engine: str = ENGINE

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    @asynccontextmanager
    async def async_client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=PATIENCE, limits=limits) as http:
            yield http

    def scheduler(self) -> Any:
        """The handle of the engine's SchedulerActor, as an ingress finds it."""
        return _eventually(lambda: find_engine(self.name, self.engine), "an engine is registered")

    def stats(self) -> EngineStats:
        stats: EngineStats = ray.get(self.scheduler().stats.remote())
        return stats

    def idle(self) -> EngineStats:
        """The counters once nothing runs, waits or holds a page."""

        def settled() -> EngineStats | None:
            stats = self.stats()
            return None if stats.running or stats.waiting or stats.pages_held else stats

        stats = _eventually(settled, "the engine is idle and holds no page")
        ray.get(self.scheduler().check_integrity.remote())
        return stats

    def samples(self) -> dict[str, float]:
        """What /metrics says of now, one number for each series: labels but reasons left out.

        Where everybody is busy it says what was a moment ago, and when that was.
        """
        asked = time.time()

        def fresh() -> dict[str, float] | None:
            found = self._samples()
            times = [value for name, value in found.items() if name.endswith(REPORTED)]
            return found if times and min(times) >= asked else None

        return _eventually(fresh, "the metrics are of now")

    def _samples(self) -> dict[str, float]:
        with self.client() as http:
            text = http.get("/metrics").raise_for_status().text
        return {
            "/".join([sample.name, *reasons(sample.labels)]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if "le" not in sample.labels
        }

    def manage(self, command: str) -> Any:
        """What the engine says to an operator's command."""
        with self.client() as http:
            key = {"Authorization": f"Bearer {ADMIN_KEY}"}
            (engine,) = (
                http.post(f"/admin/{command}", headers=key).raise_for_status().json()["engines"]
            )
        return engine

    async def stream(
        self, http: httpx.AsyncClient, body: dict[str, Any], path: str = "/v1/completions"
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of one streamed answer; it must end with [DONE]."""
        body = {"model": self.model, "stream": True, **body}
        async with http.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            done = False
            async for line in response.aiter_lines():
                assert not (done and line), f"after [DONE]: {line}"
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
            assert done, "the stream broke off"


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """A Ray of the tests' own."""
    with short_folder() as folder, pytest.MonkeyPatch.context() as environment:
        environment.setenv(CALLBACK, CALLBACK_PATH)  # as rayfin serve does
        environment.setenv("RAY_worker_niceness", "0")  # 15 is behind the other worker of pytest
        # Functions of tests travel to workers whole: these cannot import the package.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__.rpartition(".")[0]])
        ray.init(
            address="local",
            _temp_dir=folder,
            include_dashboard=False,
            object_store_memory=128 * 1024**2,
            num_cpus=8,  # one for each engine that runs at a time
            log_to_driver=False,
            logging_level="ERROR",
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture(scope="package")
def served(cluster: None) -> str:
    """Ray Serve on a free port: its address."""
    port = _free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    return f"http://127.0.0.1:{port}"  # it goes down with its Ray


@pytest.fixture(scope="package")
def app(served: str) -> Deployed:
    """The model behind the OpenAI API."""
    server = ServerArgs(admin_api_key=ADMIN_KEY, metrics_alias="vllm")
    return _deploy(bind_app(server, EngineArgs(**SETTINGS)), APP, served)


@pytest.fixture(scope="package")
def site(served: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Deployed]:
    """Makes one application of several models, and returns each of them by its name."""
    from audio_models import AudioModel
    from pooling_models import add_modules, make_encoder

    folder = tmp_path_factory.mktemp("site")
    AudioModel("voxtral", folder / "hears")
    add_modules(make_encoder(folder / "vectors"), {"pooling_mode": "mean"})
    models = [
        SETTINGS,
        {**SETTINGS, "model": str(folder / "hears"), "served_model_name": "hears"},
        # Steps of a few texts, so that a body takes several.
        {
            **{"threads": 1, "spare_runners": 0, "max_batch_tokens": 64},
            **{"model": str(folder / "vectors"), "served_model_name": "vectors"},
        },
    ]
    server = ServerArgs(
        metrics_alias="vllm",
        max_audio_seconds=2.0,
        max_audio_upload_seconds=20.0,
        batch_dir=str(folder / "batches"),
        batch_concurrency=4,
    )
    engine = EngineArgs()
    application = bind_models(server, engine, several_models(server, engine, models))
    url = _deploy(application, SITE, served, "/site").url
    return lambda model: Deployed(SITE, url, model, f"{ENGINE}-{model}")


def _deploy(application: serve.Application, name: str, server: str, prefix: str = "/") -> Deployed:
    try:
        serve.run(application, name=name, route_prefix=prefix)
    except RuntimeError as error:
        raise RuntimeError(str(serve.status())) from error  # with the deployments' own words
    return Deployed(name, server + prefix.rstrip("/"), MODEL)


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    return _free_port


@pytest.fixture
def port() -> int:
    """A free one."""
    return _free_port()


@pytest.fixture(scope="package")
def serve_driver() -> str:
    """A program that serves: its arguments are the model and the port."""
    return SERVE_DRIVER


@pytest.fixture(scope="package")
def deploy() -> Callable[..., Deployed]:
    return _deploy


@pytest.fixture(scope="package")
def model() -> str:
    return MODEL


@pytest.fixture(scope="package")
def eventually() -> Callable[..., Any]:
    return _eventually


@pytest.fixture(scope="package")
def settings() -> dict[str, Any]:
    """The engine's settings, for tests that start one more."""
    return SETTINGS


@pytest.fixture(scope="package")
def solo() -> Iterator[LLM]:
    """The same model in this process: what every served answer must equal."""
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="package")
def actors(cluster: None) -> Iterator[LLM]:
    """The same model as actors."""
    with LLM(executor="ray", **SETTINGS) as llm:
        yield llm


@pytest.fixture(params=["inline", "ray"])
def llm(request: pytest.FixtureRequest) -> LLM:
    chosen: LLM = request.getfixturevalue("solo" if request.param == "inline" else "actors")
    return chosen


@pytest.fixture(scope="package")
def greedy(solo: LLM) -> Callable[[str, int], list[int]]:
    """prompt, length -> the tokens that it is answered with when nothing else runs."""

    def tokens(prompt: str, length: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        return solo.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids

    return tokens


@dataclass(slots=True)
class Driver:
    """A child process in a session of its own, and all that it has said."""

    process: "subprocess.Popen[bytes]"
    log: Path
    folder: Path  # of its Ray

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def wait_until_nothing_is_left(self) -> None:
        _eventually(lambda: not self.relatives(), "all that it started has ended")

    def wait_for(self, text: str) -> None:
        """Until it has said ``text``."""

        def has_said() -> bool:
            if text in self.output:
                return True
            assert self.process.poll() is None, f"it ended first: {self.output}"
            return False

        _eventually(has_said, f"the output has {text!r}", seen=self.story)

    def story(self) -> str:
        """Its output, and the last lines of all that its Ray has logged."""
        lines = [self.output]
        for path in sorted(self.folder.glob("ray/session_2*/logs/**/*")):
            if path.is_file():
                last = path.read_text(errors="replace").splitlines()[-5:]
                lines += [f"{path.name}: {line}" for line in last]
        return "\n".join(lines)

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Signals the process, or its whole group as a terminal does."""
        send = os.killpg if group else os.kill
        send(self.process.pid, number)

    def kill(self) -> None:
        for pid in self.relatives():
            with suppress(ProcessLookupError):  # it has gone since
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def relatives(self) -> list[int]:
        """What lives of all that it and its children started: the processes of its session."""
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [pid for pid in pids if _session(pid) == self.process.pid]


def _session(pid: int) -> int | None:
    try:
        return None if "Z (zombie)" in Path(f"/proc/{pid}/status").read_text() else os.getsid(pid)
    except OSError:  # it has gone
        return None


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts ``python arguments``, or another program, with a Ray folder of its own."""
    with ExitStack() as stack:

        def start(*arguments: str, program: str = sys.executable, **variables: str) -> Driver:
            folder = stack.enter_context(short_folder())
            environment = {**os.environ, "RAY_TMPDIR": folder}
            environment.pop("RAY_ADDRESS", None)
            environment |= variables
            number = len(list(tmp_path.glob("*.log")))
            log = tmp_path / f"{number}.log"
            with log.open("w") as output:
                process = subprocess.Popen(
                    [program, *arguments],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            driver = Driver(process, log, Path(environment["RAY_TMPDIR"]))
            stack.callback(driver.kill)
            return driver

        yield start


def reasons(labels: dict[str, str]) -> list[str]:
    return [labels[name] for name in ("finished_reason", "reason") if name in labels]


def short_folder() -> "tempfile.TemporaryDirectory[str]":
    """Ray puts sockets deep inside its folder, and their paths may not be long."""
    return tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True)


@pytest.fixture
def http(app: Any) -> Iterator[httpx.Client]:
    with app.client() as client:
        yield client


@pytest.fixture
def client(app: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def held(app: Deployed) -> Callable[[], Held]:
    """What Serve's proxy, which has the sockets, and the ingress hold now."""

    def count(_: Any) -> tuple[int, int]:
        import asyncio
        import gc
        import os

        found = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
        return len(os.listdir("/proc/self/fd")), sum(not task.done() for task in found)

    holders = ("SERVE_PROXY_ACTOR", f"SERVE_REPLICA::{app.name}#ingress#")
    named = ray.util.list_named_actors(all_namespaces=True)
    actors = {
        each["name"]: ray.get_actor(each["name"], each["namespace"])
        for each in named
        if each["name"].startswith(holders)
    }
    assert len(actors) == 2, named
    return lambda: {
        name: ray.get(actor.__ray_call__.remote(count)) for name, actor in actors.items()
    }
