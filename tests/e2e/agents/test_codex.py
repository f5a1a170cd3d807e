"""Codex, as npm has it, does a task of several turns with a scripted model."""

import os
import subprocess
from pathlib import Path

import pytest

from scripted_agent import SECONDS, call, installed, served

VERSION = "0.171.0"
PACKAGE = f"@openai/codex@{VERSION}"
CONTEXT, FULL = 80_000, 50_000  # tokens, of which its first prompt has half
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
NOTE = '*** Begin Patch\n*** Add File: notes.md\n+Fixed "add".\n*** End Patch\n'
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

pytestmark = pytest.mark.thorough(reason="installs a program; the bodies it sends are in make test")


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, installed by npm."""
    return installed(tmp_path_factory.mktemp("npm"), PACKAGE, "codex")


def run(codex: Path, folder: Path, url: str, model: str, settings: str = "") -> str:
    """Returns the last words of a task in ``folder``, in a clean environment."""
    home = folder.parent / "home"
    home.mkdir()
    (home / "config.toml").write_text(settings + CONFIG.format(model=model, url=url))
    done = subprocess.run(
        [str(codex), "exec", "--skip-git-repo-check", "Fix calc.py"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def workplace(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    (place / "calc.py").write_text(BROKEN)
    return place


def test_a_task_of_eight_turns(codex: Path, tmp_path: Path) -> None:
    """It reads, patches and runs; later prompts begin with the earlier ones."""
    place = workplace(tmp_path)
    script = [
        "I look around.\n" + call("exec_command", cmd="ls"),
        call("exec_command", cmd="cat calc.py"),
        call("exec_command", cmd="python3 calc.py"),
        call("apply_patch", input=MEND),
        call("exec_command", cmd="python3 calc.py > out.txt"),
        call("exec_command", cmd="cat out.txt"),
        call("apply_patch", input=NOTE),
        "It is fixed.",
    ]
    with served(script, "apply_patch") as (url, engine):
        assert run(codex, place, url, "gpt-5.5").strip() == "It is fixed."
        assert (place / "calc.py").read_text() == FIXED
        assert (place / "out.txt").read_text() == "5\n"
        assert (place / "notes.md").read_text() == 'Fixed "add".\n'
        main = [p for p, said in zip(engine.prompts, engine.answers, strict=True) if said in script]
        assert len(main) == len(script)
        for before, after in zip(main, main[1:], strict=False):
            assert len(os.path.commonprefix([before, after])) > 0.95 * len(before)


def test_a_model_that_it_does_not_know(codex: Path, tmp_path: Path) -> None:
    """Its tools have namespaces then, and no patch."""
    place = workplace(tmp_path)
    fix = call("exec_command", cmd="sed -i 's/a - b/a + b/' calc.py")
    with served(["I mend it.\n" + fix, "It is fixed."], "exec_command") as (url, engine):
        assert run(codex, place, url, "scripted").strip() == "It is fixed."
        assert (place / "calc.py").read_text() == FIXED
        assert "multi_agent_v1__" in engine.prompts[-1]


def test_it_compacts_three_times_and_goes_on(codex: Path, tmp_path: Path) -> None:
    place = workplace(tmp_path)
    script = [f"Part {i}.\n" + call("exec_command", cmd="seq 1 3000") for i in range(10)]
    limits = f"model_context_window = {CONTEXT}\nmodel_auto_compact_token_limit = {FULL}\n"
    with served([*script, "All is read."], "exec_command", CONTEXT) as (url, engine):
        assert run(codex, place, url, "gpt-5.5", limits).strip() == "All is read."
        assert engine.compactions >= 3


def test_it_goes_on_where_answers_fail(codex: Path, tmp_path: Path) -> None:
    """It asks again, and the same is done, once."""
    place = workplace(tmp_path)
    script = [call("exec_command", cmd=f"echo {word} >> out.txt") for word in ("a", "b", "c")]
    with served([*script, "It is done."], "exec_command") as (url, engine):
        engine.fails_at = {2, 4, 6}
        assert run(codex, place, url, "gpt-5.5").strip() == "It is done."
        assert (place / "out.txt").read_text() == "a\nb\nc\n" and len(engine.prompts) == 7
