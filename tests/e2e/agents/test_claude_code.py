"""Claude Code, as npm has it, does a task of several turns with a scripted model."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_programs import CLAUDE, FIXED, call, new_place, run_claude
from scripted_agent import served

CONTEXT = 120_000  # tokens: of the small tokenizer, 35,000 are the agent's own
FILES = 26  # of 11,000 tokens each

pytestmark = pytest.mark.thorough(reason="installs a program; the bodies it sends are in make test")


@pytest.fixture(scope="module")
def claude(install: Callable[[str], Path]) -> Path:
    return install(CLAUDE)


def test_a_task_of_eight_turns(claude: Path, tmp_path: Path) -> None:
    """It reads, edits, runs and looks again; later prompts begin with the earlier ones."""
    place = new_place(tmp_path)
    path = place / "calc.py"
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
        assert run_claude(claude, place, url) == "It is fixed."
        assert path.read_text() == FIXED
        assert (place / "out.txt").read_text() == "5\n"
        assert (place / "notes.md").read_text() == "Fixed add.\n"
        main = [p for p, said in zip(engine.prompts, engine.answers, strict=True) if said in script]
        assert len(main) == len(script)
        for before, after in zip(main, main[1:], strict=False):
            same = os.path.commonprefix([before, after])
            assert len(same) > 0.95 * len(before)


def test_it_compacts_three_times_and_goes_on(claude: Path, tmp_path: Path) -> None:
    """A prompt that is too long is refused in the words by which it does."""
    place = new_place(tmp_path)
    lines = [f"line {j} of a long text, which fills a context" for j in range(330)]
    script = []
    for i in range(FILES):
        (place / f"long{i}.txt").write_text("\n".join(lines))
        script.append(call("Bash", command=f"cat long{i}.txt", description="Reads"))
    with served([*script, "All is read."], "Edit", CONTEXT) as (url, engine):
        assert run_claude(claude, place, url, "Read all files") == "All is read."
        assert engine.compactions >= 3
