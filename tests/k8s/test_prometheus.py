"""What is shipped for Prometheus and Grafana: generated files are fresh, rules do what they say."""

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rayfin.actors.metrics.engine_stats import ENGINE_METRICS
from rayfin.actors.metrics.render import PREFIX
from rayfin.deployments.telemetry.ingress_counters import INGRESS_METRICS

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "k8s" / "prometheus"
DASHBOARDS = sorted((ROOT / "k8s" / "grafana").glob("*.json"))
NAME = re.compile(r"\brayfin_[a-z0-9_]+")

OURS = [family for family in (*ENGINE_METRICS, *INGRESS_METRICS) if not family.alias_only]

needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool"), reason="Debian's package prometheus has promtool"
)


def series() -> set[str]:
    """The names that a scrape shows."""
    names = set()
    for family in OURS:
        name = PREFIX + family.name
        ends = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        names |= {name + end for end in ends[family.kind]}
    return names


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "k8s/grafana/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expressions() -> list[str]:
    rules = yaml.safe_load((PROMETHEUS / "rules" / "rayfin.yaml").read_text())
    found = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            found += [target["expr"] for target in panel["targets"]]
    keda = yaml.safe_load((PROMETHEUS / "keda.yaml").read_text())
    return [*found, *(trigger["metadata"]["query"] for trigger in keda["spec"]["triggers"])]


def test_generated_files_are_fresh() -> None:
    """Run ``python k8s/grafana/generate.py``."""
    written = generator().files()
    assert {path for path in written if path.suffix == ".json"} == set(DASHBOARDS)
    for path, text in written.items():
        assert path.read_text() == text, path


def test_every_series_that_is_asked_for_exists() -> None:
    asked = {name for expression in expressions() for name in NAME.findall(expression)}
    assert asked <= series(), asked - series()


def test_every_series_is_shown_somewhere() -> None:
    shown = {name for expression in expressions() for name in NAME.findall(expression)}
    for family in OURS:
        if family.name not in ("cache_config_info", "prompt_tokens_cached"):  # shown by others
            assert any(name.startswith(PREFIX + family.name) for name in shown), family.name


def test_panels_have_places_and_names_of_their_own() -> None:
    for path in DASHBOARDS:
        dashboard: dict[str, Any] = json.loads(path.read_text())
        assert dashboard["uid"] == f"rayfin-{path.stem}"
        panels = dashboard["panels"]
        places = {(own["gridPos"]["x"], own["gridPos"]["y"]) for own in panels}
        assert len(places) == len({own["title"] for own in panels}) == len(panels)


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((PROMETHEUS / "rules" / "rayfin.yaml").read_text())
    page = (ROOT / "docs" / "observability.md").read_text()
    tested = (Path(__file__).parent / "prometheus" / "rules_test.yaml").read_text()
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert f"| `{rule['alert']}` |" in page
                assert f'"{rule["alert"]}"' in tested or f"alertname: {rule['alert']}" in tested
                assert rule["labels"]["severity"] in ("critical", "warning")


def test_every_series_is_explained() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    for family in (*ENGINE_METRICS, *INGRESS_METRICS):
        assert f"`{family.name}`" in page, family.name


@needs_promtool
@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", "k8s/prometheus/prometheus.yml"],
        ["check", "rules", "k8s/prometheus/rules/rayfin.yaml"],
        ["test", "rules", "tests/k8s/prometheus/rules_test.yaml"],
    ],
)
def test_promtool_agrees(command: list[str]) -> None:
    done = subprocess.run(["promtool", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
