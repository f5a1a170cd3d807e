"""Claude Code, as npm has it, does a task of several turns with a scripted model."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripted_agent import SECONDS, call, installed, served

VERSION = "2.1.332"
PACKAGE = f"@anthropic-ai/claude-code@{VERSION}"
TOOLS = ("--allowedTools", "Bash", "Read", "Edit", "Write")
CONTEXT = 120_000  # tokens: of the small tokenizer, 35,000 are the agent's own
FILES = 26  # of 11,000 tokens each
BROKEN = "def add(a, b):\n    return a - b\n\n\nprint(add(2, 3))\n"
FIXED = BROKEN.replace("a - b", "a + b")

pytestmark = pytest.mark.thorough(reason="installs a program; the bodies it sends are in make test")


@pytest.fixture(scope="module")
def claude(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, installed by npm."""
    return installed(tmp_path_factory.mktemp("npm"), PACKAGE, "claude")


def environment(home: Path, url: str) -> dict[str, str]:
    """A clean one, without telemetry."""
    quiet = ("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER")
    return {
        **{"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb"},
        **dict.fromkeys((*quiet, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"), "1"),
        **{"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none"},
    }


def run(claude: Path, place: Path, url: str, asked: str) -> dict[str, Any]:
    """Returns the result of a task that it does in a folder."""
    home = place.parent / "home"
    home.mkdir()
    done = subprocess.run(
        [str(claude), "-p", asked, "--output-format", "json", "--max-turns", "60", *TOOLS],
        cwd=place,
        env=environment(home, url),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    assert not result["is_error"], result
    return result


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def test_a_task_of_eight_turns(claude: Path, place: Path) -> None:
    """It reads, edits, runs and looks again; later prompts begin with the earlier ones."""
    path = place / "calc.py"
    path.write_text(BROKEN)
    script = [
        "I look around.\n" + call("Bash", command="ls", description="Lists files"),
        call("Read", file_path=str(path)),
        call("Bash", command="python3 calc.py", description="Runs it"),
        call("Edit", file_path=str(path), old_string="a - b", new_string="a + b"),
        call("Bash", command="python3 calc.py > out.txt", description="Runs it again"),
        call("Read", file_path=str(place / "out.txt")),
        call("Write", file_path=str(place / "notes.md"), content="Fixed add.\n"),
        "It is fixed.",
    ]
    with served(script, "Edit") as (url, engine):
        assert run(claude, place, url, "Fix calc.py")["result"] == "It is fixed."
        assert path.read_text() == FIXED
        assert (place / "out.txt").read_text() == "5\n"
        assert (place / "notes.md").read_text() == "Fixed add.\n"
        main = [p for p, said in zip(engine.prompts, engine.answers, strict=True) if said in script]
        assert len(main) == len(script)
        for before, after in zip(main, main[1:], strict=False):
            same = os.path.commonprefix([before, after])
            assert len(same) > 0.95 * len(before)


def test_it_compacts_three_times_and_goes_on(claude: Path, place: Path) -> None:
    """A prompt that is too long is refused in the words by which it does."""
    lines = [f"line {j} of a long text, which fills a context" for j in range(330)]
    script = []
    for i in range(FILES):
        (place / f"long{i}.txt").write_text("\n".join(lines))
        script.append(call("Bash", command=f"cat long{i}.txt", description="Reads"))
    with served([*script, "All is read."], "Edit", CONTEXT) as (url, engine):
        assert run(claude, place, url, "Read all files")["result"] == "All is read."
        assert engine.compactions >= 3
