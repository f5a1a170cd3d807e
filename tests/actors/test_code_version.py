"""The code's version is part of an engine's identity: other code, another identity."""

import shutil
import subprocess
import sys
from pathlib import Path

import rayfin
from rayfin.actors.code_version import code_version, grammar_version

SAY = (
    "from rayfin.actors.config import EngineArgs; from rayfin.actors.code_version import *;"
    "print(code_version()); print(EngineArgs(model='m').identity)"
)


def _of_copy(folder: Path) -> list[str]:
    """Version and identity that a process with the package in ``folder`` computes."""
    done = subprocess.run(
        [sys.executable, "-c", SAY],
        env={"PYTHONPATH": str(folder), "PATH": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_other_code_has_another_identity(tmp_path: Path) -> None:
    package = tmp_path / "rayfin"
    shutil.copytree(
        Path(rayfin.__file__).parent,
        package,
        ignore=shutil.ignore_patterns("__pycache__", "*.so", "model"),
    )
    same = _of_copy(tmp_path)
    code = f"code={code_version()} llguidance={grammar_version()}"
    assert same == [code_version(), f"{code} model=m"]
    messages = package / "actors" / "messages.py"
    messages.write_text(messages.read_text() + "\n# another field\n")
    version, identity = _of_copy(tmp_path)
    assert version != same[0] and identity != same[1]
    assert version.startswith(f"{rayfin.__version__}+")
