"""OpenCode, as npm has it, does a task with a scripted model, by what `rayfin agents` prints."""

import json
import os
import subprocess
from pathlib import Path
from string import Template

import pytest

from rayfin.deployments.cli.agents import SETTINGS
from scripted_agent import CONTEXT, SECONDS, call, installed, served

PACKAGE = "opencode-ai@1.18.33"
BROKEN = "def add(a, b):\n    return a - b\n\n\nprint(add(2, 3))\n"
QUIET = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")

pytestmark = pytest.mark.thorough(reason="installs a program; the bodies it sends are in make test")


@pytest.fixture(scope="module")
def opencode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, installed by npm."""
    return installed(tmp_path_factory.mktemp("npm"), PACKAGE, "opencode")


def test_a_task(opencode: Path, tmp_path: Path) -> None:
    place = tmp_path / "work"
    place.mkdir()
    path = place / "calc.py"
    path.write_text(BROKEN)
    script = [
        "I look around.\n" + call("bash", command="ls", description="Lists files"),
        call("read", filePath=str(path)),
        call("edit", filePath=str(path), oldString="a - b", newString="a + b"),
        call("bash", command="python3 calc.py > out.txt", description="Runs it"),
        "It is fixed.",
    ]
    with served(script, "edit") as (url, engine):
        values = {"root": url, "model": "scripted", "context": CONTEXT, "key": "none"}
        text = Template(SETTINGS["OpenCode (opencode.json)"][1]).substitute(values, output=8192)
        config = {**json.loads(text), "autoupdate": False, "share": "disabled"}
        (place / "opencode.json").write_text(json.dumps(config))
        done = subprocess.run(
            [str(opencode), "run", "Fix calc.py"],
            cwd=place,
            env={
                **{"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TERM": "dumb"},
                **{f"OPENCODE_DISABLE_{name}": "1" for name in QUIET},
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert path.read_text() == BROKEN.replace("a - b", "a + b")
        assert (place / "out.txt").read_text() == "5\n"
        assert engine.answers[-1] == "It is fixed."
