"""Every overlay of k8s/, rendered by kustomize and held against the schemas of what reads it."""

import gzip
import importlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import ray
import yaml
from jsonschema import Draft7Validator, Draft202012Validator
from ray.serve.schema import ServeDeploySchema

from rayfin.deployments.serve.server_args import AppArgs, split_args

ROOT = Path(__file__).parents[2]
CRD = Path(__file__).parent / "crds" / "ray.io_rayservices.yaml.gz"
FOLDERS = ["base", *(f"overlays/{path.name}" for path in sorted(ROOT.glob("k8s/overlays/*")))]
PROXY_DRAIN_SECONDS = 30  # what Serve's proxy gives to open connections
KUBERNETES = "1.33"
MONITORING = "monitoring.coreos.com/v1"  # of the Prometheus operator

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl renders the manifests")


@pytest.fixture(scope="module", params=FOLDERS)
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return rendered(request.param)


def rendered(folder: str) -> list[dict[str, Any]]:
    """What ``kubectl apply -k`` would send."""
    command = ["kubectl", "kustomize", str(ROOT / "k8s" / folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def crd() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    document = yaml.load(gzip.decompress(CRD.read_bytes()), loader)
    (version,) = (own for own in document["spec"]["versions"] if own["name"] == "v1")
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [own for own in objects if own["kind"] == kind]


def rayservice(objects: list[dict[str, Any]]) -> dict[str, Any]:
    (service,) = of_kind(objects, "RayService")
    spec: dict[str, Any] = service["spec"]
    return spec


def groups(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = spec["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_every_field_of_the_rayservice_is_known(
    objects: list[dict[str, Any]], crd: dict[str, Any]
) -> None:
    strict = changed(crd, closed)
    for service in of_kind(objects, "RayService"):
        with_defaults(crd, service)
        errors = [
            f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
            for error in Draft7Validator(strict).iter_errors(service)
        ]
        assert not errors, errors


def test_a_misspelt_field_is_found(objects: list[dict[str, Any]], crd: dict[str, Any]) -> None:
    (service,) = of_kind(objects, "RayService")
    spec = {**service["spec"], "serveConfigV3": ""}
    assert list(Draft7Validator(changed(crd, closed)).iter_errors({**service, "spec": spec}))


def test_everything_else_is_valid_kubernetes(objects: list[dict[str, Any]]) -> None:
    for own in objects:
        if own["kind"] != "RayService" and own["apiVersion"] != MONITORING:
            kubernetes_validate.validate(own, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("file", "operator", "kind"),
    [
        ("podmonitor", "prometheus_operator.v1", "PodMonitor"),
        ("prometheusrule", "prometheus_operator.v1", "PrometheusRule"),
        ("keda", "keda.v1alpha1", "ScaledObject"),
    ],
)
def test_what_other_operators_read_is_theirs(file: str, operator: str, kind: str) -> None:
    """By models made from their CRDs, with unknown fields as errors."""
    path = ROOT / "k8s" / "prometheus" / f"{file}.yaml"
    # Imported here: it takes seconds, which each worker would pay.
    model = getattr(importlib.import_module(f"cloudcoil.models.{operator}"), kind)
    for own in yaml.safe_load_all(path.read_text()):
        assert own["kind"] == kind
        schema = changed(model.model_json_schema(by_alias=True), closed)
        validator = Draft202012Validator(schema)
        assert [error.message for error in validator.iter_errors(own)] == []
        own["spec"]["misspelt"] = 1
        assert list(validator.iter_errors(own))


def test_prometheus_finds_the_hub(objects: list[dict[str, Any]]) -> None:
    """The pods that are monitored are there, with their ports; Rayfin serves one of those."""
    spec = rayservice(objects)
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    pods = [group["template"] for group in groups(spec)]
    for own in of_kind(objects, "PodMonitor"):
        wanted = own["spec"]["selector"]["matchLabels"].items()
        chosen = [pod for pod in pods if wanted <= pod["metadata"]["labels"].items()]
        assert chosen
        for endpoint in own["spec"]["podMetricsEndpoints"]:
            for pod in chosen:
                assert endpoint["port"] in ports(pod)
    head, *_ = pods
    assert ports(head)["engine-metrics"] == application["args"]["metrics_port"]
    (policy,) = of_kind(objects, "NetworkPolicy")
    rules = policy["spec"]["ingress"]
    open_ports = [port["port"] for rule in rules for port in rule.get("ports", ())]
    assert application["args"]["metrics_port"] in open_ports


def test_operators_have_a_port_that_only_they_reach() -> None:
    objects = rendered("overlays/production")
    spec = rayservice(objects)
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    port = application["args"]["admin_port"]
    head, *workers = [group["template"] for group in groups(spec)]
    assert ports(head)["admin"] == port and application["args"]["admin_host"] == "0.0.0.0"
    (policy,) = of_kind(objects, "NetworkPolicy")
    (rule,) = (
        rule
        for rule in policy["spec"]["ingress"]
        if port in [own["port"] for own in rule.get("ports", ())]
    )
    (who,) = rule["from"]
    assert who["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "rayfin-operator"}
    for pod in (head, *workers):  # `build_app` reads it, wherever Ray runs that
        (container,) = pod["spec"]["containers"]
        assert "RAYFIN_ADMIN_API_KEY" in [own["name"] for own in container["env"]]


def test_a_worker_has_the_gpus_of_an_engine(objects: list[dict[str, Any]]) -> None:
    """And room for what its ranks and Ray's object store share, within the pod's memory."""
    spec = rayservice(objects)
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    args = application["args"]
    _, worker = groups(spec)
    (container,) = worker["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    gpus = args.get("tensor_parallel_size", 1) if args.get("device") == "cuda" else 0
    assert int(limits.get("nvidia.com/gpu", 0)) == gpus
    assert int(limits["cpu"]) > gpus  # a core for each rank, and for who schedules and speaks HTTP
    volumes = {own["name"]: own for own in worker["template"]["spec"]["volumes"]}
    shared = gibibytes(volumes["dshm"]["emptyDir"]["sizeLimit"])
    assert 2 * max(1, gpus) <= shared <= gibibytes(limits["memory"]) / 2


def gibibytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


def ports(pod: dict[str, Any]) -> dict[str, int]:
    (container,) = pod["spec"]["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


def test_production_is_watched() -> None:
    objects = rendered("overlays/production")
    rules = [
        rule
        for own in of_kind(objects, "PrometheusRule")
        for group in own["spec"]["groups"]
        for rule in group["rules"]
    ]
    assert len([rule for rule in rules if "alert" in rule]) > 5
    labels = [own["metadata"].get("labels", {}) for own in of_kind(objects, "ConfigMap")]
    dashboards = list((ROOT / "k8s" / "grafana").glob("*.json"))
    assert len([own for own in labels if own.get("grafana_dashboard") == "1"]) == len(dashboards)
    assert len(of_kind(objects, "PodMonitor")) == 2


def test_the_serve_config_is_one_that_ray_and_rayfin_take(objects: list[dict[str, Any]]) -> None:
    config = ServeDeploySchema(**yaml.safe_load(rayservice(objects)["serveConfigV2"]))
    (application,) = config.applications
    server, engine = split_args(AppArgs(**application.args).model_dump())
    assert application.import_path == "rayfin.deployments.app:build_app"
    assert engine.model and server.shutdown_timeout >= 30
    assert {own.name for own in application.deployments} <= {"ingress", "engine"}
    assert config.http_options.keep_alive_timeout_s > 60


def test_a_pod_is_killed_after_its_streams_had_their_time(objects: list[dict[str, Any]]) -> None:
    spec = rayservice(objects)
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    needed = application["args"]["shutdown_timeout"] + PROXY_DRAIN_SECONDS
    for group in groups(spec):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        (drain,) = (
            int(own["value"])
            for own in container["env"]
            if own["name"] == "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
        )
        assert needed <= drain < pod["terminationGracePeriodSeconds"] - 5 - 10  # preStop
    assert spec["rayClusterDeletionDelaySeconds"] >= needed


def test_what_production_asks_of_a_cluster(objects: list[dict[str, Any]]) -> None:
    spec = rayservice(objects)
    cluster = spec["rayClusterConfig"]
    head, *workers = groups(spec)
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"]["mode"] == "token"
    assert spec["excludeHeadPodFromServeSvc"] and head["rayStartParams"]["num-cpus"] == "0"
    images = {own["template"]["spec"]["containers"][0]["image"] for own in groups(spec)}
    assert len(images) == 1
    for group in groups(spec):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {"serve", "metrics"} <= {port["name"] for port in container["ports"]}
    for worker in workers:
        pod = worker["template"]["spec"]
        assert pod["containers"][0]["lifecycle"]["preStop"]
        assert {"name": "dshm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


def test_budgets_and_policies_select_the_pods(objects: list[dict[str, Any]]) -> None:
    pods = [group["template"]["metadata"]["labels"] for group in groups(rayservice(objects))]
    for own in of_kind(objects, "PodDisruptionBudget"):
        wanted = own["spec"]["selector"]["matchLabels"].items()
        assert any(wanted <= labels.items() for labels in pods)
        assert isinstance(own["spec"]["maxUnavailable"], int)
    (policy,) = of_kind(objects, "NetworkPolicy")
    wanted = policy["spec"]["podSelector"]["matchLabels"].items()
    assert all(wanted <= labels.items() for labels in pods)


def changed(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """The schema with every part of it changed, from the inside out."""
    if isinstance(schema, dict):
        return change({name: changed(part, change) for name, part in schema.items()})
    if isinstance(schema, list):
        return [changed(part, change) for part in schema]
    return schema


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Unknown fields are errors (an API server drops them); int-or-string is either."""
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    open_ended = (
        "additionalProperties" in schema or "x-kubernetes-preserve-unknown-fields" in schema
    )
    if schema.get("type") == "object" and "properties" in schema and not open_ended:
        return {**schema, "additionalProperties": False}
    return schema


def with_defaults(schema: dict[str, Any], value: Any) -> None:
    """Fills in what an API server fills in before it validates."""
    if isinstance(value, dict):
        for name, part in schema.get("properties", {}).items():
            if isinstance(part, dict):
                if "default" in part:
                    value.setdefault(name, part["default"])
                if name in value:
                    with_defaults(part, value[name])
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for item in value:
            with_defaults(schema["items"], item)
