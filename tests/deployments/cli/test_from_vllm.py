"""docs/from-vllm.md: each of vLLM's flags, and what Rayfin makes of it.

python tests/deployments/cli/test_from_vllm.py --write     # writes its tables anew
"""

import sys
from collections import Counter
from pathlib import Path

import pytest

from rayfin.deployments.cli.serve import serve
from rayfin.deployments.cli.vllm_options import IgnoredOption, options_by_name
from rayfin.deployments.vllm.table import VLLM_FLAGS, Accepted, Alias, Lacks, Rewritten, VllmFlag

PAGE = Path(__file__).resolve().parents[3] / "docs" / "from-vllm.md"
MARK = "<!-- The tables below are written by tests/deployments/cli/test_from_vllm.py --write -->\n"
OPTIONS = options_by_name(serve)


def settings(names: tuple[str, ...]) -> set[str | None]:
    return {option.name for name in names if (option := OPTIONS.get(name)) is not None}


def result(flag: VllmFlag) -> str:
    """What the page says of an alias, a rewritten switch or a refused flag."""
    outcome = flag.outcome
    if isinstance(outcome, Lacks):
        but = f", but for {' and '.join(f'`{word}`' for word in outcome.but)}"
        return f"{outcome.missing}{but if outcome.but else ''}"
    if isinstance(outcome, Alias):
        own = "--" + outcome.setting.replace("_", "-")
        words = ", ".join(f"`{word}` is `{own}`" for word, own in outcome.words.items())
        text = "the same flag" if own == flag.names[0] else f"`{own}`"
        return f"{text} ({words})" if words else text
    assert isinstance(outcome, Rewritten)
    off = f"; negated: `{outcome.off}`" if outcome.off else ""
    return f"`{outcome.on}`{off}"


def names(flag: VllmFlag) -> str:
    return ", ".join(f"`{name}`" for name in flag.names)


def table(*kinds: type) -> list[str]:
    flags = [flag for flag in VLLM_FLAGS if isinstance(flag.outcome, kinds)]
    return [f"| {names(flag)} | {result(flag)} |" for flag in sorted(flags, key=names)]


def tables() -> str:
    accepted = [flag for flag in VLLM_FLAGS if isinstance(flag.outcome, Accepted)]
    listed = ", ".join(map(names, sorted(accepted, key=names)))
    lines = ["", "## Other names", "", "| vLLM | Rayfin |", "|---|---|", *table(Alias, Rewritten)]
    lines += ["", "## Refused", "", "| vLLM | Rayfin has no |", "|---|---|", *table(Lacks)]
    return "\n".join([*lines, "", "## Accepted, without effect", "", f"{listed}."]) + "\n"


def test_the_page_is_current() -> None:
    head, mark, written = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark and written == tables(), f"run: python {Path(__file__).name} --write"


@pytest.mark.parametrize("flag", VLLM_FLAGS, ids=lambda flag: flag.names[0])
def test_every_flag_is_known(flag: VllmFlag) -> None:
    outcome = flag.outcome
    if isinstance(outcome, Alias):
        assert settings(flag.names) == {outcome.setting}
        assert all(name in OPTIONS for name in flag.names)
    elif isinstance(outcome, Accepted | Lacks):
        owners = {type(OPTIONS[name]) for name in flag.names}
        assert owners == {IgnoredOption}, f"{flag.names[0]} is Rayfin's now: make its row an Alias"
    else:
        for text in filter(None, (outcome.on, outcome.off)):
            assert text.partition("=")[0] in OPTIONS


def test_no_name_is_there_twice() -> None:
    counts = Counter(name for flag in VLLM_FLAGS for name in flag.names)
    assert [name for name, count in counts.items() if count > 1] == []
    assert len(VLLM_FLAGS) > 320


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(head + MARK + tables(), encoding="utf-8")
