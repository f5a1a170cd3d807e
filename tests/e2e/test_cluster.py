"""A Ray cluster that runs already: ``serve deploy`` on it, and ``serve`` that joins it."""

import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.serve.schema import ServeDeploySchema

from rayfin.deployments.app import build_app
from rayfin.deployments.serve.server_args import AppArgs

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_config.yaml"
QUESTION = {"messages": [{"role": "user", "content": "What is 37 + 48?"}], "temperature": 0}


@pytest.fixture
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    return loaded


def test_example_deploys_through_the_typed_builder(
    served: str,
    deploy: Callable[..., Any],
    config: dict[str, Any],
    settings: dict[str, Any],
    eventually: Callable[..., Any],
) -> None:
    """Under a prefix, with a key and another name; deleting it gives everything back."""
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "rayfin.deployments.app:build_app"
    own = {"served_model_name": "typed", "api_key": "secret", "ingress_replicas": 2}
    cpus = ray.available_resources()["CPU"]
    app = deploy(
        build_app(AppArgs(**{**application.args, **settings, **own})), "typed", served, "/typed"
    )
    key = {"Authorization": "Bearer secret"}
    with app.client() as http:
        assert http.post("/v1/chat/completions", json=QUESTION).status_code == 401
        reply = http.post("/v1/chat/completions", json=QUESTION, headers=key)
        assert reply.raise_for_status().json()["model"] == "typed"
        models = http.get("/v1/models", headers=key).raise_for_status().json()["data"]
        assert [card["id"] for card in models] == ["typed"]
    serve.delete("typed")
    eventually(lambda: ray.available_resources().get("CPU") == cpus, "its room is given back")


@pytest.fixture
def head(
    drive: Callable[..., Any], free_port: Callable[[], int], eventually: Callable[..., Any]
) -> Iterator[dict[str, str]]:
    """``ray start --head``: what a process needs to know to use it."""
    gcs, dashboard = free_port(), free_port()
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    driver = drive(
        *("-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"),
        *("--port", str(gcs), "--dashboard-port", str(dashboard)),
        *("--dashboard-agent-listen-port", str(free_port())),
        *("--ray-client-server-port", str(free_port())),
        *("--min-worker-port", "0", "--max-worker-port", "0"),
        *("--num-cpus", "2", "--object-store-memory", str(128 * 1024**2)),
        **token,
    )
    address = f"http://127.0.0.1:{dashboard}"
    headers = {"Authorization": f"Bearer {token['RAY_AUTH_TOKEN']}"}

    def answers() -> bool:
        assert driver.process.poll() is None, driver.output
        try:
            return httpx.get(f"{address}/api/version", headers=headers).status_code == 200
        except httpx.TransportError:
            return False

    eventually(answers, "the dashboard answers")
    yield {
        **token,
        "RAY_ADDRESS": f"127.0.0.1:{gcs}",
        "RAY_DASHBOARD_ADDRESS": address,
        "RAY_TMPDIR": str(driver.folder),
    }
    assert driver.process.poll() is None, "it was not ours to stop"


def test_serve_joins_a_cluster_and_serve_deploy_uses_it(
    head: dict[str, str],
    drive: Callable[..., Any],
    serve_driver: str,
    model: str,
    port: int,
    config: dict[str, Any],
    settings: dict[str, Any],
    tmp_path: Path,
    eventually: Callable[..., Any],
) -> None:
    def ask() -> str | None:
        try:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            reply = httpx.post(url, json=QUESTION, timeout=60)
        except httpx.TransportError:
            return None
        if reply.status_code != 200:
            return None
        content: str = reply.json()["choices"][0]["message"]["content"]
        return content

    joined = drive("-c", serve_driver, model, str(port), **head)
    joined.wait_for("(Ctrl-C stops it)")
    assert joined.output.startswith("Joined the Ray cluster at ")
    assert "85" in (ask() or "")
    joined.signal(signal.SIGINT)
    assert joined.wait() == 0
    assert ask() is None  # it took its Serve along

    config["http_options"]["port"] = port
    config["applications"][0]["args"] |= {**settings, "model": model}
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    deployed = drive("-m", "ray.serve.scripts", "deploy", str(file), **head)
    assert deployed.wait() == 0, deployed.output
    assert "85" in eventually(ask, "the deployed application answers")

    second = drive("-c", serve_driver, model, str(port), **head)
    assert second.wait() == 2
    assert second.output.splitlines()[-1] == (
        "error: InvalidConfig: an application 'rayfin' runs on this cluster already"
    )
    assert "85" in (ask() or "")  # and left it alone
