"""``rayfin run-batch`` with the demo model, whole and interrupted."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from peft_adapters import generate, make_adapter
from rayfin.deployments.cli.main import main
from rayfin.deployments.serve.preflight import DEMO_FOLDER

COMMAND = "import sys; from rayfin.deployments.cli.main import main; sys.exit(main())"


def _line(name: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    if url == "/v1/chat/completions":
        body = {"messages": [{"role": "user", "content": f"What is {name} + 4?"}], **body}
    limit = "max_output_tokens" if url == "/v1/responses" else "max_tokens"
    body = {"model": "demo", limit: 12, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


def _answers(path: Path) -> dict[str | None, dict[str, Any]]:
    values = [json.loads(line) for line in path.read_text().splitlines()]
    assert max(Counter(own["custom_id"] for own in values).values()) == 1
    return {own["custom_id"]: own for own in values}


def _text(answer: dict[str, Any]) -> Any:
    return answer["response"]["body"]["choices"][0]["message"]["content"]


def _arguments(folder: Path, *more: str) -> list[str]:
    files = ["-i", str(folder / "in"), "-o", str(folder / "out"), "--model", "demo"]
    return ["run-batch", *files, "--threads", "1", *more]


def test_lines_of_several_routes_are_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        *(_line("30", temperature=0), _line("31"), _line("32", model="other")),
        *(_line("33", "/v1/completions", prompt="a"), _line("34", "/v1/responses", input="b")),
        *(_line("35", "/v1/embeddings", input="c"), "nonsense\n"),
    ]
    (tmp_path / "in").write_text("".join(lines))
    assert main(_arguments(tmp_path)) == 0
    assert "7 lines are answered" in capsys.readouterr().err
    answers = _answers(tmp_path / "out")
    assert _text(answers["30"]) == "30 + 4 = 34"
    status = {
        name: own["response"] and own["response"]["status_code"] for name, own in answers.items()
    }
    assert status == {
        **{"30": 200, "31": 200, "32": 404, "33": 200, "34": 200, "35": 404},
        None: None,
    }
    assert answers[None]["error"]["line"] == 7
    assert answers["32"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert main(_arguments(tmp_path)) == 0  # nothing is left, and no model is loaded
    assert "All 7 lines are answered" in capsys.readouterr().err
    assert _answers(tmp_path / "out") == answers


def test_lines_name_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of --lora-modules, one that is found in --lora-dir; with peft's tokens."""
    prompt, ask = [300, 301, 302, 303, 304], {"temperature": 0, "max_tokens": 6}
    folders = {
        "own": make_adapter(DEMO_FOLDER, tmp_path / "own", seed=1),
        "found": make_adapter(DEMO_FOLDER, tmp_path / "more" / "found", seed=2),
    }
    more = {"prompt": prompt, "return_token_ids": True, "ignore_eos": True, **ask}
    names = ("demo", "own", "found", "none")
    lines = [_line(name, "/v1/completions", **more, model=name) for name in names]
    (tmp_path / "in").write_text("".join(lines))
    flags = ["--lora-modules", f"own={folders['own']}", "--lora-dir", str(tmp_path / "more")]
    assert main(_arguments(tmp_path, "--max-loras", "2", *flags)) == 0
    answers = _answers(tmp_path / "out")
    assert answers["none"]["response"]["status_code"] == 404
    for name in names[:3]:
        (choice,) = answers[name]["response"]["body"]["choices"]
        assert choice["token_ids"] == generate(DEMO_FOLDER, folders.get(name), prompt, 6), name
    flags = ["--lora-modules", f"own={tmp_path / 'more'}"]
    (tmp_path / "out").unlink()
    assert main(_arguments(tmp_path, *flags)) == 2
    assert "lora" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run-batch", "-i", "none", "-o", "out"], "there is no file none"),
        (["run-batch", "-i", "none"], "Missing option '-o' / '--output-file'"),
        (["run-batch", "-i", "a", "-o", "b", "--concurrency", "0"], "0 is not in the range"),
    ],
)
def test_mistakes_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.slow(reason="starts three processes, each with a model")
def test_killed_and_interrupted_runs_go_on(tmp_path: Path) -> None:
    """Sampled texts too are those of a run that nothing interrupts."""
    (tmp_path / "in").write_text("".join(_line(str(i), temperature=1.0) for i in range(400)))
    command = [sys.executable, "-c", COMMAND, *_arguments(tmp_path, "--concurrency", "8")]
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        before = _size(tmp_path)
        while _size(tmp_path) == before:
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait() == status
        assert not (tmp_path / "out").exists()
    assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0
    answers = _answers(tmp_path / "out")
    assert set(answers) == {str(i) for i in range(400)}
    (tmp_path / "out").unlink()
    assert main(_arguments(tmp_path)) == 0
    quiet = _answers(tmp_path / "out")
    assert {name: _text(own) for name, own in answers.items()} == {
        name: _text(own) for name, own in quiet.items()
    }


def _size(folder: Path) -> int:
    partial = folder / "out.partial"
    return partial.stat().st_size if partial.exists() else 0
