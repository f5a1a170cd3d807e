"""Coding agents as npm has them: how they are installed and run, and what they mend."""

import json
import os
import shutil
import subprocess
from pathlib import Path

SECONDS = 300  # of an installation, or a task
CLAUDE = "@anthropic-ai/claude-code@2.1.332"
CODEX = "@openai/codex@0.171.0"
BROKEN = "def add(a, b):\n    return a - b\n\n\nprint(add(2, 3))\n"
FIXED = BROKEN.replace("a - b", "a + b")
MEND = """\
*** Begin Patch
*** Update File: calc.py
@@
 def add(a, b):
-    return a - b
+    return a + b
*** End Patch
"""
CONFIG = """\
model = "{model}"
model_provider = "rayfin"
check_for_update_on_startup = false
approval_policy = "never"
sandbox_mode = "danger-full-access"
[analytics]
enabled = false
[model_providers.rayfin]
name = "Rayfin"
base_url = "{url}/v1"
wire_api = "responses"
"""
"""Of Codex."""


class NpmUnreachable(RuntimeError):
    """A package cannot be installed here."""


def call(name: str, **arguments: object) -> str:
    """Returns a tool call as the model writes it."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def installed(folder: Path, package: str) -> Path:
    """Returns the folder of the programs of a package that npm has installed.

    Raises:
        NpmUnreachable: it has not.
    """
    if shutil.which("npm") is None:
        raise NpmUnreachable("there is no npm")
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise NpmUnreachable(f"npm cannot be reached: {done.stderr[-200:]}")
    return folder / "node_modules" / ".bin"


def new_place(folder: Path) -> Path:
    """Returns a folder with the program to mend."""
    place = folder / "work"
    place.mkdir(parents=True)
    (place / "calc.py").write_text(BROKEN)
    return place


def run_claude(programs: Path, place: Path, url: str, asked: str = "Fix calc.py") -> str:
    """Returns the last words of a task that Claude Code does in a folder."""
    quiet = ("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER")
    tools = ("--allowedTools", "Bash", "Read", "Edit", "Write")
    said = _run(
        [str(programs / "claude"), "-p", asked, "--output-format", "json", *tools],
        place,
        **{"TERM": "dumb", "ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none"},
        **dict.fromkeys((*quiet, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"), "1"),
    )
    result = json.loads(said)
    assert not result["is_error"], result
    return str(result["result"])


def run_codex(
    programs: Path, place: Path, url: str, model: str = "gpt-5.5", settings: str = ""
) -> str:
    """Returns the last words of a task that Codex does in a folder."""
    home = place.parent / "home"
    home.mkdir()
    (home / "config.toml").write_text(settings + CONFIG.format(model=model, url=url))
    command = [str(programs / "codex"), "exec", "--skip-git-repo-check", "Fix calc.py"]
    return _run(command, place, CODEX_HOME=str(home)).strip()


def _run(command: list[str], place: Path, **variables: str) -> str:
    """Runs a program in a folder, in a clean environment, and returns what it writes."""
    home = place.parent / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=place,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
