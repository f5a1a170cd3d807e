"""The rows of tools/house.py that must hold: rooms, maps, names, homes of constants, words."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).parents[1] / "tools" / "house.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rayfin_tools_house", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


HOUSE = _load()


def test_every_held_row_holds() -> None:
    broken = [row for row in HOUSE.table() if row.held and row.broken]
    assert not broken, "\n".join("\n".join([f"{row.name}:", *row.broken[:40]]) for row in broken)


def test_a_vague_name_counts_where_it_is_bound(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    text = "def f(own):\n for most in own:\n  made = [found for found in most]\n  made.found()\n"
    path.write_text(text)
    names = sorted(HOUSE._vague_names(HOUSE.Source(path)))
    assert names == [(1, "own"), (2, "most"), (3, "found"), (3, "made")]


@pytest.mark.parametrize("word", ["nobody", "nobody's", "Whoever", "in vain", "is told", "untold"])
def test_forbidden_words_are_found(word: str) -> None:
    assert HOUSE.FORBIDDEN_WORDS.search(f"a {word} b")


@pytest.mark.parametrize("word", ["totold", "scaffolding", "hurts_nobody"])
def test_other_words_are_not(word: str) -> None:
    assert not HOUSE.FORBIDDEN_WORDS.search(f"a {word} b")
