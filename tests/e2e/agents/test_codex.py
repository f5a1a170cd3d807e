"""Codex, as npm has it, does a task of several turns with a scripted model."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_programs import CODEX, FIXED, MEND, call, new_place, run_codex
from scripted_agent import make_tokenizer, served

CONTEXT = 28_672  # tokens, of which its first prompt has half
DOCS = Path(__file__).parents[3] / "docs"
NOTE = '*** Begin Patch\n*** Add File: notes.md\n+Fixed "add".\n*** End Patch\n'

pytestmark = pytest.mark.thorough(reason="installs a program; the bodies it sends are in make test")


@pytest.fixture(scope="module")
def codex(install: Callable[[str], Path]) -> Path:
    return install(CODEX)


def test_a_task_of_eight_turns(codex: Path, tmp_path: Path) -> None:
    """It reads, patches and runs; later prompts begin with the earlier ones."""
    place = new_place(tmp_path)
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
        assert run_codex(codex, place, url) == "It is fixed."
        assert (place / "calc.py").read_text() == FIXED
        assert (place / "out.txt").read_text() == "5\n"
        assert (place / "notes.md").read_text() == 'Fixed "add".\n'
        main = [p for p, said in zip(engine.prompts, engine.answers, strict=True) if said in script]
        assert len(main) == len(script)
        for before, after in zip(main, main[1:], strict=False):
            assert len(os.path.commonprefix([before, after])) > 0.95 * len(before)


def test_a_model_that_it_does_not_know(codex: Path, tmp_path: Path) -> None:
    """Its tools have namespaces then, and no patch."""
    place = new_place(tmp_path)
    fix = call("exec_command", cmd="sed -i 's/a - b/a + b/' calc.py")
    with served(["I mend it.\n" + fix, "It is fixed."], "exec_command") as (url, engine):
        assert run_codex(codex, place, url, "scripted") == "It is fixed."
        assert (place / "calc.py").read_text() == FIXED
        assert "multi_agent_v1__" in engine.prompts[-1]


def test_it_compacts_three_times_and_goes_on(codex: Path, tmp_path: Path) -> None:
    """By nothing but the line of its settings that `rayfin agents` prints."""
    place = new_place(tmp_path)
    script = [f"Part {i}.\n" + call("exec_command", cmd="seq 1 1000") for i in range(20)]
    tokenizer = make_tokenizer([path.read_text() for path in DOCS.glob("*.md")], 4096)
    limit = f"model_context_window = {CONTEXT}\n"
    with served([*script, "All is read."], "exec_command", CONTEXT, tokenizer) as (url, engine):
        assert run_codex(codex, place, url, settings=limit) == "All is read."
        assert engine.compactions >= 3


def test_it_goes_on_where_answers_fail(codex: Path, tmp_path: Path) -> None:
    """It asks again, and the same is done, once."""
    place = new_place(tmp_path)
    script = [call("exec_command", cmd=f"echo {word} >> out.txt") for word in ("a", "b", "c")]
    with served([*script, "It is done."], "exec_command") as (url, engine):
        engine.fails_at = {2, 4, 6}
        assert run_codex(codex, place, url) == "It is done."
        assert (place / "out.txt").read_text() == "a\nb\nc\n" and len(engine.prompts) == 7
