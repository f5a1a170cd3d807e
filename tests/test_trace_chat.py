"""How many files a plain chat runs through, and that it enters no more rooms of features."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow(reason="serves a model")

PATH = Path(__file__).parents[1] / "tools" / "trace_chat.py"
MOST_FILES = 103  # the goal is 60; lower it with each file that a chat no longer enters
STILL_ENTERED = {"actors/runner/speculation": 4}  # the default method drafts for every chat


def test_a_plain_chat_runs_through_few_files() -> None:
    spec = importlib.util.spec_from_file_location("rayfin_trace_chat", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    files = module.trace_chat()
    assert "actors/scheduler/engine.py" in files and "actors/runner/model_runner.py" in files
    assert len(files) <= MOST_FILES, "\n".join(files)
    entered = [name for name in files if name.startswith(module.FEATURES)]
    rooms = {str(Path(name).parent) for name in entered}
    counts = {room: sum(str(Path(name).parent) == room for name in entered) for room in rooms}
    assert all(count <= STILL_ENTERED.get(room, 0) for room, count in counts.items()), entered
