"""The command line: flags from dataclasses, one line for every mistake, and the commands."""

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from rayfin import __version__
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import ContextLengthExceeded, EngineUnavailable, InvalidConfig
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.cli import chat, generate
from rayfin.deployments.cli.agents import settings
from rayfin.deployments.cli.main import cli, main
from rayfin.deployments.cli.options import FieldOption, build, field_options, values_of
from rayfin.deployments.edge.listen_options import ListenOptions
from rayfin.deployments.offline.outputs import CompletionOutput, RequestOutput
from rayfin.deployments.serve.server_args import ServerArgs

Output = Callable[[], tuple[str, str]]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What one failed command wrote: a single line on the standard error."""
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("rayfin: error: ")
    return err.removeprefix("rayfin: error: ").rstrip("\n")


# The flags


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("serve", [f.name for kind in (ServerArgs, EngineArgs) for f in fields(kind)]),
        (
            "generate",
            [*generate.SAMPLING, *(f.name for f in fields(EngineArgs)), "dummy_seed", "executor"],
        ),
        ("chat", [*chat.SAMPLING, "url", "api_key", "model", "system", "quick"]),
    ],
)
def test_help_lists_every_field(command: str, expected: list[str]) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert result.exit_code == 0
    words = result.output.replace("/", " ").replace(",", " ").split()
    assert [name for name in expected if flag(name) not in words] == []
    assert "Example:" in result.output


def test_help_shows_types_defaults_and_help() -> None:
    text = " ".join(CliRunner().invoke(cli, ["serve", "-h"]).output.split())
    assert "--scheduler [v1|v0] v1: token-level" in text
    assert (
        "--page-size, --block-size INTEGER tokens in a page of the KV cache [default: 16]" in text
    )
    assert "--trust-remote-code / --no-trust-remote-code" in text
    assert "[default: 127.0.0.1]" in text


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rayfin {__version__}\n"
    assert main([]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.partition("Commands:\n")[2].splitlines()[:5]] == [
        *("serve", "generate", "run-batch", "chat", "agents")
    ]


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from rayfin.deployments.cli.main import main; main(['serve', '--help']);"
        "print([name for name in ('ray', 'torch', 'transformers', 'httpx', 'rich') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field of each kind that a flag can be made from."""

    number: int = 1
    share: float | None = None
    on: bool = True
    kind: Literal["a", "b"] = "a"
    maybe: Literal["x"] | None = None
    words: list[str] | None = None


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("", {"number": 1, "on": True, "kind": "a"}),
        ("--number 2 --share 0.5 --no-on --kind b --maybe x", {"number": 2, "share": 0.5}),
        ("--words one --words two --on", {"words": ["one", "two"], "on": True}),
        ("--kind c", None),
        ("--maybe y", None),
        ("--number 1.5", None),
    ],
)
def test_options_of_a_dataclass(
    monkeypatch: pytest.MonkeyPatch, line: str, values: dict[str, Any] | None
) -> None:
    monkeypatch.setitem(sys.modules["rayfin.deployments.cli.options"].SECTIONS, "Settings", "")
    seen: list[Settings] = []

    @click.command()
    @field_options(Settings)
    def command(**flags: Any) -> None:
        seen.append(build(Settings))
        assert set(values_of(Settings)) <= {f.name for f in fields(Settings)}

    result = CliRunner().invoke(command, line.split())
    if values is None:
        assert result.exit_code == 2 and not seen
    else:
        assert result.exit_code == 0, result.output
        assert {name: getattr(seen[0], name) for name in values} == values


# Mistakes


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --max-modle-len 5", "--max-model-len"),
        ("serve --max-model-len many", "Invalid value for '--max-model-len'"),
        ("serve --dtype int8", "Invalid value for '--dtype'"),
        ("serve --max-model-len 0", "--max-model-len must be at least 1, got 0"),
        ("serve --memory-utilization 2", "--memory-utilization must be in (0, 1], got 2.0"),
        ("serve one --model two", "MODEL is one and --model is two"),
        ("serve --port 0", "Invalid value for '--port'"),
        ("srve", "No such command 'srve'"),
        ("generate --temperature 3 hello", "--temperature must be at most 2, got 3.0."),
        ("generate --page-size 0 hello", "--page-size must be at least 1, got 0"),
        ("generate --seed 99999999999999999999 hello", "--seed must be at most"),
        ("chat --top-p 0", "--top-p must be in (0, 1]"),
        ("chat --url ftp://here", "--url must look like"),
    ],
)
def test_a_wrong_flag_is_one_line_and_status_2(
    capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert main(line.split()) == 2
    assert message in error_line(capsys)


# serve


@dataclass
class FakeServing:
    """Stands for rayfin.deployments.serve.serving."""

    calls: list[tuple[Any, ...]]
    error: BaseException | None = None

    def serve(self, server: ServerArgs, engine: EngineArgs, **more: Any) -> int:
        self.calls.append((server, engine, more))
        if self.error is not None:
            raise self.error
        return 0


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> FakeServing:
    import rayfin.deployments.serve as package

    fake = FakeServing([])
    module = ModuleType("rayfin.deployments.serve.serving")
    module.serve = fake.serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package, "serving", module, raising=False)
    monkeypatch.setattr("rayfin.deployments.serve.ports.require_ports", lambda *_: None)
    monkeypatch.setenv("RAYFIN_FORKED_WORKERS", "0")
    return fake


def test_serve_passes_its_flags_on(serving: FakeServing) -> None:
    line = "serve org/name --port 9000 --host 0.0.0.0 --max-model-len 512 --trust-remote-code"
    assert main([*line.split(), *"--served-model-name me --shutdown-timeout 5".split()]) == 0
    server, engine, more = serving.calls[0]
    assert server == ServerArgs(served_model_name=["me"], shutdown_timeout=5.0)
    assert engine == EngineArgs(model="org/name", max_model_len=512, trust_remote_code=True)
    assert more.pop("listen_options") == ListenOptions()
    assert more.pop("forks") is None
    assert more == {"host": "0.0.0.0", "port": 9000, "name": "rayfin", "verbose": False}


@pytest.mark.parametrize(
    ("line", "model"),
    [("", "demo"), ("here", "here"), ("--model here", "here"), ("here --model here", "here")],
)
def test_the_model_of_serve(serving: FakeServing, line: str, model: str) -> None:
    assert main(["serve", *line.split()]) == 0
    assert serving.calls[0][:2] == (ServerArgs(), EngineArgs(model=model))


def test_the_key_may_come_from_the_environment(
    serving: FakeServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYFIN_API_KEY", "secret")
    assert main(["serve"]) == 0
    assert serving.calls[0][0].api_key == ["secret"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidConfig("port 8000 is taken", "port"), 2, "--port 8000 is taken"),
        (
            InvalidConfig("max_model_len (9) is over max_batch_tokens, sadly", "max_model_len"),
            2,
            "--max-model-len (9) is over --max-batch-tokens, sadly",
        ),
        (InvalidConfig("holds no weights", "model"), 2, "--model: holds no weights"),
        (EngineUnavailable("no GPU is free"), 1, "no GPU is free"),
        (
            KeyError("oops"),
            1,
            "KeyError: 'oops' (rayfin --traceback serve ... shows where)",
        ),
    ],
)
def test_errors_are_one_line(
    serving: FakeServing,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    status: int,
    message: str,
) -> None:
    serving.error = error
    assert main(["serve"]) == status
    assert error_line(capsys) == message


def test_traceback_on_demand(serving: FakeServing, capsys: pytest.CaptureFixture[str]) -> None:
    serving.error = EngineUnavailable("no GPU is free")
    assert main(["--traceback", "serve"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_ctrl_c_is_quiet(serving: FakeServing, capsys: pytest.CaptureFixture[str]) -> None:
    serving.error = KeyboardInterrupt()
    assert main(["serve"]) == 130
    assert "".join(capsys.readouterr()).strip() == ""


# generate


class FakeLLM:
    """Stands for rayfin.deployments.offline.llm.LLM; answers each prompt with its own words."""

    made: dict[str, Any]
    asked: tuple[str, Any, SamplingParams]
    error: Exception | None = None

    def __init__(self, **settings: Any) -> None:
        type(self).made = settings

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *details: object) -> None:
        pass

    def generate(self, prompts: Any, params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        return self._answer("generate", prompts, params)

    def chat(self, prompts: Any, params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
        return self._answer("chat", prompts, params)

    def _answer(self, kind: str, prompts: Any, params: SamplingParams) -> list[RequestOutput]:
        type(self).asked = (kind, prompts, params)
        if self.error is not None:
            raise self.error
        return [
            RequestOutput(
                str(number),
                None,
                [1, 2],
                [CompletionOutput(i, f"é{number}.{i}", [3], "length") for i in range(params.n)],
            )
            for number, _ in enumerate(prompts)
        ]


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    module = ModuleType("rayfin.deployments.offline.llm")
    fake = type("OwnFakeLLM", (FakeLLM,), {})
    module.LLM = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake


def test_generate(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    line = "generate --model m --executor ray --dtype float32 --dummy-seed 5 --seed 7 --stop a"
    assert main([*line.split(), "--stop", "b c", "--max-tokens", "3", "one prompt"]) == 0
    assert capsys.readouterr().out == "é0.0\n"
    assert llm.made.pop("executor") == "ray"
    assert EngineArgs(**llm.made) == EngineArgs(model="m", dtype="float32", seed=5)
    kind, prompts, params = llm.asked
    assert (kind, prompts) == ("generate", ["one prompt"])
    assert params == SamplingParams(seed=7, stop=["a", "b c"], max_tokens=3)


def test_generate_chats_with_lines_of_stdin(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\r\n\n two \nthree"))
    assert main("generate --chat --n 2 --json".split()) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["prompt"], line["index"], line["text"]) for line in lines] == [
        (prompt, index, f"é{number}.{index}")
        for number, prompt in enumerate(["one", " two ", "three"])
        for index in range(2)
    ]
    assert lines[0]["prompt_tokens"] == 2 and lines[0]["completion_tokens"] == 1
    kind, prompts, _ = llm.asked
    assert (kind, prompts[1]) == ("chat", [{"role": "user", "content": " two "}])


def test_generate_names_prompts_where_there_are_several(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "a", "b"]) == 0
    assert capsys.readouterr().out == "> a\né0.0\n\n> b\né1.0\n\n"
    assert main(["generate", "a", "--n", "2"]) == 0
    assert capsys.readouterr().out == "> [0] a\né0.0\n\n> [1] a\né0.1\n\n"


def test_generate_without_a_prompt(
    llm: type[FakeLLM], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    assert main(["generate"]) == 2
    assert "no PROMPT" in error_line(capsys)


def test_a_prompt_that_does_not_fit(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    llm.error = ContextLengthExceeded("The prompt is too long.", "prompt")
    assert main(["generate", "a"]) == 1
    assert error_line(capsys) == "The prompt is too long."


# chat


def test_chat_once(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--temperature 0 --stop x --system S --api-key K --model other".split()
    assert main(["chat", "--url", fake_server.url, "-q", "hello", *line]) == 0
    assert capsys.readouterr().out == "You said hello\n"
    (body,) = fake_server.bodies
    assert body["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hello"},
    ]
    assert (body["model"], body["stream"]) == ("other", True)
    assert (body["temperature"], body["stop"]) == (0.0, ["x"])
    assert "top_p" not in body and "max_tokens" not in body  # the server's own defaults hold
    assert fake_server.keys == ["Bearer K"]


def test_chat_drops_control_characters(
    fake_server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", fake_server.url, "-q", "a\x1b[2Jb\x9bc\tdé"]) == 0
    assert capsys.readouterr().out == "You said a[2Jbc\tdé\n"


def test_chat_keeps_its_history(
    fake_server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "one\nfail\nbreak\n\nerror\ntwo\n/what\n/clear\nthree\n/exit\nfour\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    bare = fake_server.url.removeprefix("http://").removesuffix("/v1")
    assert main(["chat", "--url", bare, "--system", "S"]) == 0
    system = {"role": "system", "content": "S"}
    one = [
        system,
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "You said one"},
    ]
    asked = {body["messages"][-1]["content"]: body["messages"] for body in fake_server.bodies}
    assert asked["two"] == [*one, {"role": "user", "content": "two"}]  # failures left no trace
    assert asked["three"] == [system, {"role": "user", "content": "three"}]
    assert "four" not in asked
    out, err = capsys.readouterr()
    assert out.endswith("You said three\n")
    assert err.splitlines() == [
        "rayfin: error: HTTP 429: The queue is full.",
        "rayfin: error: the stream broke off before its end",
        "rayfin: error: The engine died.",
        "unknown command /what: /help lists the commands",
        "A new conversation.",
    ]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("fail", "HTTP 429: The queue is full."),
        ("break", "the stream broke off before its end"),
        ("error", "The engine died."),
    ],
)
def test_chat_once_fails(
    fake_server: Any, capsys: pytest.CaptureFixture[str], question: str, message: str
) -> None:
    assert main(["chat", "--url", fake_server.url, "-q", question]) == 1
    assert capsys.readouterr().err.strip().endswith(f"rayfin: error: {message}")


def test_agents(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agents", "--url", fake_server.url, "--api-key", "K"]) == 0
    out = capsys.readouterr().out
    root = fake_server.url.removesuffix("/v1")
    assert f"ANTHROPIC_BASE_URL={root}\n" in out and f'base_url = "{root}/v1"' in out
    assert "ANTHROPIC_AUTH_TOKEN=K" in out and "$" not in out
    assert 'env_key = "RAYFIN_API_KEY"  # export RAYFIN_API_KEY=K\n' in out
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()
    assert settings("http://127.0.0.1:8000", "demo", 131072) in page


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "-q", "hello", "--url", "http://127.0.0.1:1"]) == 1
    assert error_line(capsys) == (
        "no server answers at http://127.0.0.1:1/v1; `rayfin serve` starts one"
    )


def test_something_else_answers(fake_server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "-q", "hi", "--url", fake_server.url.replace("/v1", "/v2")]) == 1
    assert error_line(capsys).startswith("HTTP 404")


@pytest.mark.parametrize("command", ["serve", "generate", "run-batch"])
def test_every_default_is_in_the_help(command: str) -> None:
    settings = [own for own in cli.commands[command].params if isinstance(own, FieldOption)]
    context = click.Context(cli.commands[command])
    for option in settings:
        if option.owner is not SamplingParams:  # whose defaults are the model's
            record = option.get_help_record(context)
            assert record is not None and "default" in record[1], option.name
