"""OpenCode, as npm has it, does a task with a scripted model, by what `rayfin agents` prints."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from string import Template

import pytest

from agent_programs import FIXED, SECONDS, call, new_place
from rayfin.deployments.cli.agents import SETTINGS
from scripted_agent import CONTEXT, served

PACKAGE = "opencode-ai@1.18.33"
QUIET = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")

pytestmark = pytest.mark.thorough(reason="installs a program; the bodies it sends are in make test")


@pytest.fixture(scope="module")
def opencode(install: Callable[[str], Path]) -> Path:
    return install(PACKAGE) / "opencode"


def test_a_task(opencode: Path, tmp_path: Path) -> None:
    place = new_place(tmp_path)
    path = place / "calc.py"
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
        assert path.read_text() == FIXED
        assert (place / "out.txt").read_text() == "5\n"
        assert engine.answers[-1] == "It is fixed."
