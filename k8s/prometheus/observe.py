"""Starts Debian's Prometheus with the configuration beside it, until Ctrl-C.

python k8s/prometheus/observe.py [--port 9090] [--target 127.0.0.1:8000]
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

CONFIG = Path(__file__).parent / "prometheus.yml"
INSTALL = ("apt-get", "install", "--yes", "--no-install-recommends", "prometheus")


def find_prometheus() -> str:
    """Returns the path of the program; installs Debian's package if it is missing."""
    if (path := shutil.which("prometheus")) is not None:
        return path
    if shutil.which("apt-get") is None:
        sys.exit("prometheus is not installed, and there is no apt-get to install it.")
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    print("Installing Debian's prometheus ...", flush=True)
    policy = {**os.environ, "RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}
    if subprocess.run([*sudo, *INSTALL], env=policy).returncode:
        sys.exit("It cannot be installed; try: apt-get update")
    return shutil.which("prometheus") or sys.exit("The package brought no prometheus.")


def write_config(folder: Path, targets: list[str], interval: str | None = None) -> Path:
    """Returns the shipped configuration, with other targets and interval if given."""
    config = yaml.safe_load(CONFIG.read_text())
    config["rule_files"] = [str(CONFIG.parent / path) for path in config["rule_files"]]
    if targets:
        config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    if interval:
        config["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def command(program: str, config: Path, folder: Path, address: str) -> list[str]:
    return [
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=warn",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Watch a Rayfin on this machine.")
    parser.add_argument("--port", type=int, default=9090)
    parser.add_argument("--target", action="append", default=[], metavar="HOST:PORT")
    options = parser.parse_args()
    program = find_prometheus()
    address = f"127.0.0.1:{options.port}"
    with tempfile.TemporaryDirectory(prefix="rayfin-prometheus-") as name:
        folder = Path(name)
        config = write_config(folder, options.target)
        process = subprocess.Popen(command(program, config, folder, address))
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        print(
            f"Prometheus: http://{address}/graph, alerts at /alerts  (Ctrl-C stops it)", flush=True
        )
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal has sent SIGINT to Prometheus too
            process.terminate()
            process.wait()
            return 0


if __name__ == "__main__":
    sys.exit(main())
