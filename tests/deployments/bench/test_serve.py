"""``rayfin bench serve`` against a server of this process that writes tokens at once."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rayfin.deployments.bench.client import OpenLoop
from rayfin.deployments.cli.main import main

LENGTH = 300


class Answers(BaseHTTPRequestHandler):
    """A model of 300 tokens of context; it says that half of each prompt was cached."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        card = {"id": "tiny", "max_model_len": LENGTH}
        self._send(json.dumps({"data": [card]}), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        usage = {
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": len(body["prompt"]) // 2},
        }
        events = [
            json.dumps({"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}}),
            json.dumps({"choices": [], "usage": usage}),
            "[DONE]",
        ]
        self._send("".join(f"data: {event}\n\n" for event in events), "text/event-stream")

    def _send(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The server's address, and the bodies that it has read."""
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (Answers,), {"asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}", asked
        serving.shutdown()
        thread.join()


def bench(url: str, *flags: str) -> int:
    return main(["bench", "serve", "--url", url, *flags])


def test_a_made_trace_fits_what_the_server_says(
    server: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, asked = server
    flags = "--dataset-name mooncake-toolagent --num-prompts 12 --trace-speed inf"
    assert bench(url, *flags.split(), "--goodput", "ttft:60000") == 0
    assert len(asked) == 12
    assert all(len(body["prompt"]) + body["max_tokens"] <= LENGTH for body in asked)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mooncake-toolagent: 12 requests in ")
    assert f"to fit {LENGTH}" in lines[0]
    assert lines[1].startswith("goodput ") and "100.0% of 12 requests within TTFT" in lines[1]
    assert any("% of them from the prefix cache" in line for line in lines)


def test_a_file_is_sent_with_its_prefixes(
    server: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, asked = server
    file, out = tmp_path / "calls.jsonl", tmp_path / "out.json"
    entry = {"timestamp": 0, "input_length": 20, "output_length": 2}
    lines = [{**entry, "hash_ids": [1, 2, 3]}, {**entry, "hash_ids": [1, 2, 4]}]
    file.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--timed-trace-chunk-hash-size", "8", "--json", str(out)]
    assert bench(url, "--trace", str(file), *flags) == 0
    first, second = (body["prompt"] for body in asked)
    assert len(first) == len(second) == 20
    assert first[:16] == second[:16] and first[16:] != second[16:]
    (run,) = json.loads(out.read_text())
    assert (run["cached_prompt_tokens"], run["prompt_tokens"]) == (20, 40)


def test_bad_files_are_named(
    server: tuple[str, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "calls.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 20}\n')
    assert bench(server[0], "--trace", str(file)) == 2
    error = capsys.readouterr().err
    assert "line 1: output_length is missing" in error and error.count("\n") == 1
    assert bench(server[0], "--trace", str(file), "--dataset-path", str(file)) == 2
    assert "--dataset-path" in capsys.readouterr().err


def test_the_highest_rate_is_one_line(
    server: tuple[str, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, asked = server
    out = tmp_path / "out.json"
    flags = "--requests 6 --prompt-tokens 4 --output-tokens 2 --request-rate 200"
    limits = "--goodput e2el:60000 --find-rate 99% --find-rate-runs 2"
    assert bench(url, *flags.split(), *limits.split(), "--json", str(out)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "highest rate with 99 % of requests within E2E 60000 ms: 400 requests/s "
        "(no higher one was tried; 2 runs)"
    )
    assert len(asked) == 12 and len({tuple(body["prompt"]) for body in asked}) == 12
    assert json.loads(out.read_text())["highest_rate"] == 400


def test_ctrl_c_prints_what_was_answered(
    server: tuple[str, list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = OpenLoop.run

    def interrupted(self: OpenLoop, jobs: Any) -> Any:
        whole(self, jobs[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(OpenLoop, "run", interrupted)
    flags = "--requests 6 --prompt-tokens 4 --output-tokens 2".split()
    assert bench(server[0], *flags) == 130
    printed = capsys.readouterr().out
    assert "interrupted at 3 of 6 requests: 3 requests in" in printed
    search = [*flags, "--goodput", "ttft:60000", "--find-rate", "90"]
    assert bench(server[0], *search) == 130
    assert capsys.readouterr().out.startswith("no run has ended")
