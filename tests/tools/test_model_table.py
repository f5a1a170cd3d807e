"""docs/models.md says of every family of transformers what tools/model_table.py finds."""

import re
import sys
from pathlib import Path

import pytest
from packaging.version import Version
from transformers import __version__

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from model_table import BEGIN, DOCS, END, FAMILIES, Verdict, judge, tables  # noqa: E402


def _documented() -> dict[str, bool]:
    """Family -> whether the table says that it is served."""
    text = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    served, *others = re.split(r"^### (?!Served)", text, flags=re.MULTILINE)
    found = dict.fromkeys(re.findall(r"`([^`]+)`", served), True)
    for part in others:
        found |= dict.fromkeys(re.findall(r"^\| `([^`]+)`", part, flags=re.MULTILINE), False)
    return found


def test_every_family_has_its_row() -> None:
    """And no other one has, unless an older transformers is installed than the table is of."""
    found = re.search(r"^Of \d+ causal families of transformers (\S+),", DOCS.read_text(), re.M)
    assert found is not None
    documented = _documented().keys()
    assert documented >= set(FAMILIES)
    if Version(__version__) >= Version(found[1]):
        assert documented == set(FAMILIES)


def test_few_decoders_are_refused() -> None:
    text = DOCS.read_text(encoding="utf-8")
    count = re.search(r"^### Refused decoders: (\d+)$", text, flags=re.MULTILINE)
    assert count is not None and int(count[1]) <= 15


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3_5", "gptj", "codegen", "gpt_neo", "gpt_neox_japanese", "falcon"),
        *("granitemoehybrid", "deepseek_v3", "deepseek_v32", "mpt", "xglm"),
    ],
)
def test_families_are_as_documented(family: str) -> None:
    verdict = judge(family)
    assert (verdict.state == "served") == _documented()[family], verdict.reason


def test_tables() -> None:
    verdicts = [
        Verdict("a", "served"),
        Verdict("b", "refused", "it is a|b"),
        Verdict("bart", "refused", "no"),
        Verdict("c", "not built", "KeyError"),
    ]
    text = tables(verdicts)
    assert text.startswith(f"Of 4 causal families of transformers {__version__}, 1 are served.")
    assert "### Served: 1\n\n`a`\n" in text
    assert "### Refused decoders: 1\n\n| Family | Why |\n|---|---|\n| `b` | it is a/b |\n" in text
    assert "| `bart` | no |" in text and "| `c` | KeyError |" in text
