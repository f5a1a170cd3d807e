"""A Prometheus beside a running Rayfin: every query of every panel of every dashboard has data."""

import itertools
import json
import math
import runpy
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "k8s" / "grafana").glob("*.json"))
VLLM_QUERIES = ROOT / "tests" / "support" / "vllm_queries.json"
WINDOW = "30s"  # in place of Grafana's $__rate_interval

pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="Debian's package prometheus is not installed"
)


@pytest.fixture(scope="module")
def observe() -> SimpleNamespace:
    """The script behind ``make observe``."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "k8s" / "prometheus" / "observe.py")))


@pytest.fixture
def prometheus(
    app: Any, observe: SimpleNamespace, tmp_path: Path, port: int, eventually: Callable[..., Any]
) -> Iterator[httpx.Client]:
    """It scrapes the application's ingress twice a second."""
    config = observe.write_config(tmp_path, [app.url.removeprefix("http://")], "500ms")
    program = observe.find_prometheus()
    address = f"127.0.0.1:{port}"
    process = subprocess.Popen(observe.command(program, config, tmp_path, address))
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=30) as client:
            eventually(lambda: answers(client, "/-/ready"), "Prometheus is ready")
            yield client
    finally:
        process.terminate()
        process.wait()


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


def written() -> Iterator[tuple[str, str]]:
    """Every query of our dashboards, and of the kind that vLLM's and its scorers ask; its place."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']} {target['refId']}", target["expr"]
    for title, asked in json.loads(VLLM_QUERIES.read_text()).items():
        for query in asked:
            yield f"vLLM: {title}", query


def queries() -> Iterator[tuple[str, str]]:
    """They as Grafana would send them, with all models and engines chosen."""
    values = {"$__rate_interval": WINDOW, "$model": ".*", "$engine": ".*"}
    for place, query in written():
        for name, value in values.items():
            query = query.replace(name, value)
        assert "$" not in query, query
        yield place, query


def evaluated(client: httpx.Client, query: str) -> list[float]:
    reply = client.get("/api/v1/query", params={"query": query}).raise_for_status().json()
    return [float(found["value"][1]) for found in reply["data"]["result"]]


def test_every_panel_has_data(
    app: Any, http: httpx.Client, prometheus: httpx.Client, eventually: Callable[..., Any]
) -> None:
    up = "count_over_time(rayfin_num_requests_running[30s]) > 1"
    eventually(lambda: evaluated(prometheus, up), "it was scraped twice")
    missing: list[str] = []
    tries = itertools.count()

    def send_requests() -> None:
        for number in range(4):
            prompt = f"{'Tell me of the sea. ' * 20}{number % 2}"
            body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": number > 1}
            http.post("/v1/completions", json={**body, "n": 2}).raise_for_status()
        form = {"choice": [f"yes {next(tries)}", "no"]}  # a grammar that is new to the engine
        body = {"prompt": "Is the sea wet?", "structured_outputs": form}
        http.post("/v1/completions", json=body).raise_for_status()

    def all_have_data() -> bool:
        # A counter that is scraped for the first time has no rate yet, so each try counts more.
        send_requests()
        missing[:] = [
            f"{place}: {query}"
            for place, query in queries()
            if not any(map(math.isfinite, evaluated(prometheus, query)))
        ]
        return not missing

    try:
        eventually(all_have_data, "every panel has data")
    except AssertionError:
        pytest.fail("\n".join(missing))
    assert len(list(queries())) > 160
    rules = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert rules
    for rule in (rule for group in rules for rule in group["rules"]):
        assert rule["health"] in ("ok", "unknown") and not rule.get("lastError"), rule


def test_make_observe(
    app: Any, drive: Callable[..., Any], port: int, eventually: Callable[..., Any]
) -> None:
    """It says where Prometheus is, which scrapes; Ctrl-C stops both."""
    script = str(ROOT / "k8s" / "prometheus" / "observe.py")
    target = app.url.removeprefix("http://")
    driver = drive(script, "--port", str(port), "--target", target)
    driver.wait_for(f"http://127.0.0.1:{port}/graph")
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        eventually(lambda: answers(client, "/-/ready"), "Prometheus is ready")
        eventually(lambda: evaluated(client, "rayfin_ingress_replicas"), "it has scraped")
    driver.signal(signal.SIGINT, group=True)
    assert driver.wait() == 0, driver.output
    driver.wait_until_nothing_is_left()
