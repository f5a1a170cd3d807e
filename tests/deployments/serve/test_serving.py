"""What ``serve`` says: its stages, and the summary."""

import io
import json
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayfin.actors.config import EngineArgs
from rayfin.actors.media.part import MediaFacts
from rayfin.actors.messages import EngineInfo
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.deployments.edge.listen_options import PLAIN
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.preflight import InBackground
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.serve.serving import _await
from rayfin.deployments.serve.startup import StartUp, loading, readable, sought, summary

CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Screen(io.StringIO):
    """A terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._written = threading.Condition()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._written:
            count = super().write(text)
            self._written.notify_all()
        return count

    def plain(self) -> str:
        return CONTROL.sub("", self.getvalue())

    def wait_for(self, text: str) -> None:
        with self._written:
            assert self._written.wait_for(lambda: text in self.plain(), 30), self.plain()


def welcome(capsys: pytest.CaptureFixture[str], host: str, port: int, **settings: Any) -> str:
    models = [ModelArgs(ServerArgs(**settings), EngineArgs())]
    StartUp().summary(
        *summary(models, host, port, PLAIN, [EngineInfo("engine", 2048, 300, 64, 16)])
    )
    return capsys.readouterr().out


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1"])
def test_summary_shows_an_address_that_can_be_opened(
    capsys: pytest.CaptureFixture[str], host: str
) -> None:
    text = welcome(capsys, host, 8123, served_model_name="tiny")
    assert "Rayfin serves tiny at http://127.0.0.1:8123/v1 (Ctrl-C stops it)\n" in text
    assert "2,048 tokens a request; 1,024 in the KV cache, 64 pages of 16\n" in text
    assert "http://127.0.0.1:8123/ui\n" in text
    assert "Authorization" not in text
    assert "/ui" not in welcome(capsys, host, 8123, ui=False)


def test_summary_says_how_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [ModelArgs(ServerArgs(), EngineArgs())]
    info = EngineInfo("engine", 2048, 300, 64, 16, page_bytes=10**6)

    def memory(info: EngineInfo) -> str | None:
        return dict(summary(models, "127.0.0.1", 1, PLAIN, [info])[0]).get("memory")

    assert memory(info) == "64 MB of KV cache, taken page by page"
    assert memory(replace(info, memory_bytes=70 * 10**6)) == (
        "up to 70 MB an engine (--memory-utilization): 6 MB of weights and activations, 64 MB of "
        "KV cache, taken page by page"
    )
    assert memory(replace(info, page_bytes=0)) is None


def test_summary_says_that_tools_have_no_place(tmp_path: Path) -> None:
    def said(template: object, **settings: Any) -> str | None:
        config = {} if template is None else {"chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        models = [ModelArgs(ServerArgs(**settings), EngineArgs(model=str(tmp_path)))]
        infos = [EngineInfo("engine", 2048, 300, 64, 16)]
        return dict(summary(models, "127.0.0.1", 1, PLAIN, infos)[0]).get("tools")

    line = "written into the system message: the chat template has no place for them"
    assert said("{{ messages }}") == line
    assert said("{{ messages }}", tool_call_parser="none") is None
    assert said("{{ tools }}{{ messages }}") is None
    assert said([{"name": "tool_use", "template": "{{ tools }}"}]) is None
    assert said(None) is None
    assert said("{{ tools }}", chat_template="{{ messages }}") == line
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert said("{{ tools }}") == line


@pytest.mark.parametrize(
    "recipe, said, asked",
    [
        (
            PoolingRecipe("embed", True, ("mean",), dimensions=384),
            "512 tokens a text; it answers with vectors of 384 numbers",
            "/v1/embeddings ",
        ),
        (
            PoolingRecipe("classify", True, ("cls",), labels=("relevant",)),
            "512 tokens a text; it answers with scores",
            "/v1/rerank ",
        ),
        (
            PoolingRecipe("classify", True, ("cls",), labels=("good", "bad")),
            "512 tokens a text; it answers with classes",
            "127.0.0.1:1/classify ",
        ),
    ],
)
def test_summary_asks_a_pooling_model_for_what_it_gives(
    recipe: PoolingRecipe, said: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayfin.deployments.serve.startup.read_recipe", lambda args: recipe)
    models = [ModelArgs(ServerArgs(), EngineArgs())]
    infos = [EngineInfo("engine", 512, 300, 64, 16)]
    rows, example = summary(models, "127.0.0.1", 1, PLAIN, infos)
    assert dict(rows)["context"] == said and asked in example
    assert "KV cache" not in repr(rows) and "chat" not in example


def test_summary_keeps_the_key_to_itself(capsys: pytest.CaptureFixture[str]) -> None:
    text = welcome(capsys, "127.0.0.1", 1, api_key="secret")
    assert "secret" not in text and '"Authorization: Bearer $KEY"' in text


def test_summary_asks_whisper_for_a_transcript() -> None:
    models = [ModelArgs(ServerArgs(served_model_name="whisper"), EngineArgs())]
    info = EngineInfo(
        "engine", 1952, 300, 500, 16, parts=(MediaFacts(token_id=0, front_tokens=1504),)
    )
    _, example = summary(models, "127.0.0.1", 1, PLAIN, [info])
    assert "/v1/audio/transcriptions -F model=whisper -F file=@speech.mp3" in example


def test_stages_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    start_up = StartUp()
    with start_up.stage("Starting") as done:
        done("Started")
    with pytest.raises(RuntimeError), start_up.stage("Loading [x]", announced=True):
        raise RuntimeError
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Started \(\d+\.\d s\)\.", first) and second == "Loading [x] ..."


def test_a_terminal_sees_the_stage_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, shown = Screen(), threading.Event()
    monkeypatch.setattr(sys, "stdout", screen)
    start_up = StartUp()

    def details() -> str:
        shown.set()
        return "1 of 2 parts ready"

    with start_up.stage("Loading [x]", details) as done:
        assert shown.wait(30)
        screen.wait_for("Loading [x] · 1 of 2 parts ready")
        done("Loaded [x]")
    assert "✓ Loaded [x]" in screen.plain()


def test_an_endpoint_is_shown_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://user:secret@hub.test:8443/a")
    models = [ModelArgs(ServerArgs(), EngineArgs(model="org/x"))]
    assert sought(models) == "org/x at https://hub.test:8443"


def test_what_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """A plain output says at once what may take long; of folders it says nothing."""

    class Slow(InBackground):
        """Not done until it is waited for."""

        done = False

    models = [
        ModelArgs(ServerArgs(), EngineArgs(model=name)) for name in ("demo", "org/x", "org/y")
    ]
    _await(Slow(lambda: None), models, StartUp())
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Looking for org/x, org/y at https://huggingface.co ..."
    assert second.startswith("Found org/x, org/y at https://huggingface.co (")
    _await(Slow(lambda: None), models[:1], StartUp())
    done = InBackground(lambda: None)
    done.result()
    _await(done, models, StartUp())
    assert not capsys.readouterr().out


def test_what_is_loaded() -> None:
    models = [
        ModelArgs(ServerArgs(), EngineArgs(model="demo")),
        ModelArgs(ServerArgs(), EngineArgs(model="org/x")),
        ModelArgs(ServerArgs(), EngineArgs(model="org/y", load_format="dummy")),
    ]
    assert loading(models) == "demo (4 MB of weights), org/x, org/y (random weights)"
    assert [readable(size) for size in (7, 1500, 2.5e6, 7.24e9)] == [
        *("7 bytes", "2 kB", "2 MB", "7.2 GB")
    ]
