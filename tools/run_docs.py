"""Runs the commands in README and docs as written, page by page, and reports the result of each.

    make docs     # all pages; ARGS="README.md serving.md:98" for one page and one block

A block that starts a server runs against that server; other blocks that need one share a server of
the built-in model, the previous one or one with two engines. A comment that begins with "needs",
"takes" or "changes" states why its command is skipped; alone on its line, why the rest of the block
is. The ports of the documents (8000, 8001, 9090, 9400, 9401) and of a Ray cluster (6379, 8265) must
be free. The exit status is 1 if a command failed.
"""

import argparse
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import httpx

ROOT = Path(__file__).parents[1]
DOCS = runpy.run_path(str(ROOT / "tests" / "deployments" / "test_docs.py"))
"""The list of pages, and the pattern of a block."""

KEY = "RAYFIN_ADMIN_API_KEY"
OWN_SERVER = "rayfin serve --data-parallel-size 2"
PLAIN = ("make serve", OWN_SERVER)
"""Servers that blocks without one can use."""

SERVERS = (["rayfin", "serve"], ["make", "serve"], ["ray", "start"], ["serve", "deploy"])
"""Beginnings of the commands that start a server."""

START_SECONDS, STOP_SECONDS = 600.0, 120.0
COMMAND_SECONDS = 900.0
WATCH_SECONDS = 15.0  # for a command that runs until Ctrl-C

COMMENT = re.compile(r"(?:^|\s)#\s*(.*)$")
REASON = re.compile(r"(?:needs|takes|changes) [^:;]*")
"""The reason in a comment; text after it is for the reader."""

ASKS = re.compile(
    "curl |make observe|python benchmarks/users"
    "|rayfin (chat|bench serve|status|drain|cache|sleep|wake)"
)
"""Beginnings of the commands that need a server."""

STAND_INS = {
    "Qwen/Qwen3-0.6B": "demo",
    "Qwen/Qwen3-8B": "demo",
    "/models/my-finetune": "./my-model",
    "--max-model-len 8192": "--max-model-len 512",
    " [MODEL]": "",
}
"""Replacements of names in the documents."""

NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "*_cache", "__pycache__")

ENDLESS = ("make observe", "rayfin status")
"""Commands that run until Ctrl-C; the same commands with further flags end by themselves."""


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive commands of a page, or a Python program."""

    page: Path
    line: int  # of the first command
    kind: str
    text: str

    @property
    def commands(self) -> list[tuple[str, str]]:
        """The commands without comments, and why each is skipped, or an empty string."""
        if self.kind == "python":
            Path("snippet.py").write_text(self.text)
            return [("python snippet.py", "")]
        commands, reason_for_rest = [], ""
        for line in self.text.replace("\\\n", " ").splitlines():
            comment = COMMENT.search(line)
            reason = REASON.match(comment[1]) if comment else None
            if command := COMMENT.sub("", line).strip():
                commands.append((command, reason[0].strip() if reason else reason_for_rest))
            elif reason:
                reason_for_rest = reason[0].strip()
        return commands


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in DOCS["BLOCK"].finditer(text):
        kind, inside = match.groups()
        if kind == "python" or (kind == "" and "►" not in inside):  # not a diagram
            yield Block(page, text.count("\n", 0, match.start()) + 2, kind, inside)


class Server:
    """A command that serves, in its own session."""

    def __init__(self, command: str) -> None:
        self.log = Path("server.log")
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {command}" if command.startswith("ray") else command],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, address: str) -> str:
        """Waits until the address answers. Returns the end of the log if it does not."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(address, timeout=10).status_code in (
                    200,
                    401,
                ):  # 401: Ray, without a token
                    return ""
            time.sleep(0.5)
        return self.log.read_text()[-1500:] or "no output"

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Reader:
    """Runs the commands of pages and counts results."""

    def __init__(self) -> None:
        self.failed = self.ran = 0
        self.skipped: Counter[str] = Counter()  # by reason
        self._server: Server | None = None
        self._serving = ""  # the command that started it

    def read(self, block: Block) -> None:
        with patch.dict(os.environ):  # exports of a block end with it
            self._run_block(block)

    def _run_block(self, block: Block) -> None:
        commands = block.commands
        to_run = [command for command, reason in commands if not reason]
        if any(map(ASKS.match, to_run)) and not any(map(is_server, to_run)):
            self._start_own("--engine" in block.text)
        for command, reason in commands:
            if reason:
                self.skipped[reason] += 1
                self._print(block, "not run", command, reason)
                continue
            started = time.monotonic()
            problem = self._run(stand_in(command))
            self.ran += 1
            self.failed += bool(problem)
            state = "FAILED" if problem else f"{time.monotonic() - started:5.1f} s"
            self._print(block, state, command, problem)
        if self._serving not in PLAIN:
            self.stop()

    def _run(self, command: str) -> str:
        """Runs a command and returns its problem, or an empty string."""
        if command.startswith("export "):
            name, _, value = command.removeprefix("export ").partition("=")
            os.environ[name] = value
            return ""
        return self._start(command) if is_server(command) else run(command)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
        self._server, self._serving = None, ""

    def _start(self, command: str) -> str:
        if command.startswith("serve deploy"):  # uses the cluster of the command before it
            return run(command) or (self._server.wait(health(command)) if self._server else "")
        self.stop()
        self._server, self._serving = Server(command), command
        return self._server.wait(health(command))

    def _start_own(self, two_engines: bool) -> None:
        if self._serving not in PLAIN or (two_engines and self._serving != OWN_SERVER):
            if problem := self._start(OWN_SERVER):
                raise SystemExit(f"{OWN_SERVER}: {problem}")

    def _print(self, block: Block, state: str, command: str, note: str) -> None:
        suffix = f"  ({note})" if state == "not run" else ""
        if state != "not run" and stand_in(command) != command:
            suffix = f"  (as: {stand_in(command)})"
        print(f"{block.page.name}:{block.line:<4} {state:>8}  {command}{suffix}", flush=True)
        if state == "FAILED":
            print("    " + note.strip().replace("\n", "\n    "), flush=True)


def is_server(command: str) -> bool:
    words = shlex.split(command)
    plain = [word for word in words if "=" not in word.partition("-")[0]]  # without variables
    plain[:1] = [word.removeprefix(".venv/bin/") for word in plain[:1]]
    return plain[:2] in SERVERS


def health(command: str) -> str:
    """The URL at which the started server reports its health."""
    words = shlex.split(command)
    if words[0] == "ray":
        return "http://127.0.0.1:8265/api/version"
    port = words[words.index("--port") + 1] if "--port" in words else "8000"
    return f"http://127.0.0.1:{port}/health"


def stand_in(command: str) -> str:
    for name, replacement in STAND_INS.items():
        command = command.replace(name, replacement)
    return command


def run(command: str) -> str:
    """Runs a command to its end and returns its problem, or an empty string."""
    endless = command in ENDLESS
    process = subprocess.Popen(
        ["bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=WATCH_SECONDS if endless else COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT if endless else signal.SIGKILL)
        output, _ = process.communicate()
        if not endless:
            return f"it ran over {COMMAND_SECONDS:.0f} s\n{output[-1500:]}"
    allowed = (0, 130, -signal.SIGINT) if endless else (0,)
    return "" if process.returncode in allowed else f"{output[-1500:]}\nexit {process.returncode}"


@contextmanager
def workplace() -> Iterator[None]:
    """Changes to a copy of the repository with the files that the commands expect."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="rf-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        shutil.copytree(ROOT, folder, symlinks=True, ignore=NOT_COPIED, dirs_exist_ok=True)
        environment = folder / ".venv"
        environment.mkdir()
        for path in Path(sys.prefix).iterdir():  # Python finds its packages beside its executable
            if not path.name.startswith(".installed"):
                (environment / path.name).symlink_to(path)
        for marker in (".installed-serving", ".installed", ".installed-bench"):
            (environment / marker).touch()  # so that make installs nothing
        shutil.copytree(ROOT / "deployments" / "demo" / "model", folder / "my-model")
        (folder / ".curlrc").write_text("fail-with-body\nno-progress-meter\n")
        os.environ["CURL_HOME"] = name
        (folder / "keys.txt").write_text("tests:secret\n")
        (folder / "prompts.txt").write_text("The capital of Peru is\nWhat is 37 + 48?\n")
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        os.environ.setdefault("RAY_TMPDIR", name)
        os.environ[KEY] = "..."  # as in the documents
        os.environ.pop("RAY_ADDRESS", None)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="PAGE, or PAGE:LINE of a block; default: all")
    chosen = parser.parse_args().pages
    chosen_blocks = [
        block
        for page in DOCS["PAGES"]
        for block in blocks(page)
        if not chosen or {page.name, f"{page.name}:{block.line}"} & set(chosen)
    ]
    if not chosen_blocks:
        parser.error(f"no block at {' '.join(chosen)}")
    reader = Reader()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the server
    with workplace():
        try:
            for block in chosen_blocks:
                reader.read(block)
        finally:
            reader.stop()
    print(
        f"{reader.ran} ran, {reader.failed} of them failed; {reader.skipped.total()} were not run"
    )
    for reason, count in reader.skipped.most_common():
        print(f"{count:4}  {reason}")
    return 1 if reader.failed else 0


if __name__ == "__main__":
    sys.exit(main())
