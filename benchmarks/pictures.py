"""Takes the screenshots of the documents from a real run: the page at /ui and the dashboards.

    make pictures

A server of the built-in model works for some users; a browser opens the page and asks something,
Prometheus scrapes, and what it answers to the panels' own queries is drawn. Needs Chromium,
playwright, matplotlib and Debian's package prometheus.
"""

import argparse
import json
import math
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import matplotlib
from playwright.sync_api import sync_playwright
from server import free_ports, served

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
PANELS = {
    "overview": ("Answers by status", "Tokens", "Requests in the engines", "KV cache in use"),
}
"""Dashboard -> titles of the four panels that are drawn."""

WINDOW = "10s"  # in place of Grafana's $__rate_interval
UNITS = {"s": "seconds", "reqps": "a second", "tokens/s": "tokens a second", "percentunit": "share"}
QUESTIONS = ("What is 37 + 48?", "What is the weather in Rome?")
TOOL = "weather"  # in the question that is sent with the page's weather tool


def observe() -> SimpleNamespace:
    """The script behind ``make observe``."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "k8s" / "prometheus" / "observe.py")))


def photograph(url: str, folder: Path) -> None:
    """Takes the page with answered questions, while the engine serves others: desk and phone."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(60_000)
        page.goto(f"{url}/ui")
        time.sleep(10)  # for the lines to grow
        for question, answers in zip(QUESTIONS, (1, 2), strict=True):
            if TOOL in question:
                page.evaluate("document.getElementById('weather').click()")
            page.fill("#prompt", question)
            page.click("#send")
            page.locator(".turn.assistant small").nth(answers - 1).wait_for()
        page.click(".call button")
        page.locator(".turn.assistant small").nth(2).wait_for()
        page.wait_for_timeout(1000)
        page.screenshot(path=folder / "ui.png")
        phone = browser.new_page(viewport={"width": 390, "height": 760}, device_scale_factor=2)
        phone.goto(f"{url}/ui")
        phone.wait_for_selector("#examples button")
        phone.wait_for_timeout(1000)
        phone.screenshot(path=folder / "ui-phone.png")
        browser.close()


def panel(dashboard: str, title: str) -> Any:
    panels = json.loads((ROOT / "k8s" / "grafana" / f"{dashboard}.json").read_text())["panels"]
    return next(shown for shown in panels if shown["title"] == title)


def series(prometheus: httpx.Client, query: str, since: float) -> list[Any]:
    """Prometheus' answer to one of a panel's queries, as Grafana sends it."""
    for name, value in {"$__rate_interval": WINDOW, "$model": ".*", "$engine": ".*"}.items():
        query = query.replace(name, value)
    asked = {"query": query, "start": since, "end": time.time(), "step": 1}
    answer = prometheus.get("/api/v1/query_range", params=asked).raise_for_status()
    curves: list[Any] = answer.json()["data"]["result"]
    return curves


def draw(prometheus: httpx.Client, dashboard: str, since: float, path: Path) -> None:
    figure, places = pyplot.subplots(2, 2, figsize=(10, 5.6), layout="constrained")
    for title, axes in zip(PANELS[dashboard], places.flat, strict=True):
        shown = panel(dashboard, title)
        for target in shown["targets"]:
            for curve in series(prometheus, target["expr"], since):
                label = target["legendFormat"]
                for name, value in curve["metric"].items():
                    label = label.replace(f"{{{{{name}}}}}", value)
                points = [(at - since, float(value)) for at, value in curve["values"]]
                known = [point for point in points if math.isfinite(point[1])]
                if any(value for _, value in known):
                    axes.plot(*zip(*known, strict=True), label=label, linewidth=1.4)
        unit = UNITS.get(shown["fieldConfig"]["defaults"]["unit"], "")
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel(unit, fontsize=8)
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7, frameon=False, loc="upper left", ncols=3)
    figure.supxlabel("seconds", fontsize=8)
    figure.savefig(path, dpi=100)


def take(url: str, folder: Path, seconds: float) -> None:
    module, (port,) = observe(), free_ports(1)
    config = module.write_config(folder, [url.removeprefix("http://")], "1s")
    program = module.find_prometheus()
    watching = subprocess.Popen(module.command(program, config, folder, f"127.0.0.1:{port}"))
    flags = ("--url", f"{url}/v1", "--users", "12", "--duration", str(seconds))
    script = Path(__file__).with_name("users.py")
    users = subprocess.Popen([sys.executable, str(script), *flags], stdout=sys.stderr)
    since = time.time()
    try:
        time.sleep(seconds / 4)
        photograph(url, PICTURES)
        users.wait()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as prometheus:
            for dashboard in PANELS:
                draw(prometheus, dashboard, since, PICTURES / f"{dashboard}.png")
    finally:
        for process in (users, watching):
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="Take the pictures of the documents.")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of load")
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    with served() as url, tempfile.TemporaryDirectory(prefix="rayfin-pictures-") as name:
        take(url, Path(name), options.seconds)
    for path in sorted(PICTURES.glob("*.png")):
        print(path.relative_to(ROOT), f"{path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
