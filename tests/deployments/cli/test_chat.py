"""``rayfin chat``: commands, messages of several lines, and Markdown on a terminal."""

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayfin.deployments.bench.endpoint import StreamPiece
from rayfin.deployments.cli.main import main
from rayfin.deployments.cli.screen import MarkdownScreen, complete_blocks

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


def talk(
    monkeypatch: pytest.MonkeyPatch, url: str, *lines: str, flags: tuple[str, ...] = ()
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join([*lines, ""])))
    assert main(["chat", "--url", url, *flags]) == 0


def test_commands(
    fake_server: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    lines = ["/retry", "one", "/system Be brief.", "/set temperature 0.5", "/retry", "/set"]
    lines += ["/set temperature", "/set stop a b", "/system -", '"""two', "", 'three"""']
    talk(monkeypatch, fake_server.url, *lines, f"/save {tmp_path}/talk.json", "/exit", "four")
    first, second, third = fake_server.bodies
    question = {"role": "user", "content": "one"}
    assert first["messages"] == [question]
    assert second["messages"] == [{"role": "system", "content": "Be brief."}, question]
    assert (first.get("temperature"), second["temperature"]) == (None, 0.5)
    assert third["messages"][0] == question and "temperature" not in third
    assert (third["messages"][-1]["content"], third["stop"]) == ("two\n\nthree", ["a b"])
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert saved[:-1] == third["messages"] and saved[-1]["role"] == "assistant"
    err = capsys.readouterr().err
    assert "There is no question yet." in err and "temperature 0.5\n" in err
    assert "system message: none\n" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set heat 1", "there is no heat; there are temperature, max_tokens"),
        ("/set temperature -1", "temperature must be"),
        ("/set temperature high", "temperature must be a number, got high"),
        ("/save", "/save needs the name of a file"),
        ("/save /no/such/folder", "/no/such/folder: No such file or directory"),
        ("/help", "/set [NAME [VALUE]]"),
    ],
)
def test_commands_that_go_wrong_end_nothing(
    fake_server: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    message: str,
) -> None:
    talk(monkeypatch, fake_server.url, line, "two")
    assert message in capsys.readouterr().err
    assert len(fake_server.bodies) == 1


ANSWER = """# Title

Some *words*
in two lines.

1. one

   more of one

2. two

```python
def f():

    return 1
```
| a | b |
|---|---|
| 1 | 2 |

The end"""


def test_blocks_are_complete_once_something_else_follows() -> None:
    """However the text is cut into pieces, all of it is printed, whole blocks at a time."""
    for size in (1, 3, 7, len(ANSWER)):
        printed, rest = [], ""
        for at in range(0, len(ANSWER), size):
            done, rest = complete_blocks(rest + ANSWER[at : at + size])
            printed += [done] if done else []
        assert "".join(printed) + rest == ANSWER
        fences = [part for part in printed if "```" in part]
        assert all(part.count("```") % 2 == 0 for part in fences), size
        lists = [part for part in printed if "1. one" in part]
        assert all("2. two" in part for part in lists), size
    assert complete_blocks("a\n\nb") == ("", "a\n\nb")  # "b" may still become "b. "
    assert complete_blocks("a\n\nand more") == ("a\n\n", "and more")


class Screen(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True


def pieces(text: str, reasoning: str = "") -> Iterator[StreamPiece]:
    if reasoning:
        yield StreamPiece(reasoning=reasoning)
    for at, character in enumerate(text):
        yield StreamPiece(character, completion_tokens=at + 1)


def rendered(monkeypatch: pytest.MonkeyPatch, stream: Iterator[StreamPiece]) -> str:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("TERM", "xterm")
    MarkdownScreen().answer(stream)
    return CONTROL.sub("", screen.getvalue())


def test_a_terminal_shows_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = rendered(monkeypatch, pieces(ANSWER, "Let me think."))
    for text in ("Title", "Some words", "def f():", "return 1", "The end", "Let me think."):
        assert text in shown
    assert "```" not in shown and "*words*" not in shown and "|---|" not in shown
    assert f"{len(ANSWER)} tokens · first after" in shown


def test_ctrl_c_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Iterator[StreamPiece]:
        yield StreamPiece("half an **answer**")
        raise KeyboardInterrupt

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    with pytest.raises(KeyboardInterrupt):
        MarkdownScreen().answer(interrupted())
    assert "half an answer" in CONTROL.sub("", screen.getvalue())
