"""The tool that counts JSON-Schema-Test-Suite: its words, and when it fails."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.fixture(scope="module")
def suite() -> ModuleType:
    path = Path(__file__).parents[2] / "tools" / "json_schema_suite.py"
    spec = importlib.util.spec_from_file_location("json_schema_suite", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, schema: Any, *tests: tuple[Any, bool]) -> str:
    folder.mkdir()
    listed = [{"description": "d", "data": data, "valid": valid} for data, valid in tests]
    group = {"description": "d", "schema": schema, "tests": listed}
    (folder / "one.json").write_text(json.dumps([group]))
    return str(folder)


def test_words_and_exit_status(
    suite: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = write(tmp_path / "right", {"type": "integer"}, (7, True), ("x", False), (1.0, True))
    assert suite.main([right]) == 0
    assert "3 instances, {'right': 2, 'strict': 1}" in capsys.readouterr().out
    wrong = write(tmp_path / "wrong", {"type": "integer"}, (7, False))
    assert suite.main([right, wrong]) == 1
    assert suite.main([str(tmp_path / "absent")]) == 1


def test_refusals_may_only_fall(
    suite: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "draft", UNIQUE, ([1], True), ([1, 1], False))
    for most, status in ((2, 0), (1, 1)):
        monkeypatch.setitem(suite.MOST, "draft", {"refused": most, "strict": 0})
        assert suite.main([folder]) == status


def test_schemas_as_people_send_them(suite: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """None is accepted wrongly, and no more are refused or too strict than were.

    ``python tools/json_schema_suite.py --drawn 4000`` counts ten times as many.
    """
    assert suite.main(["--drawn", "400"]) == 0, capsys.readouterr().out
