"""The documents: their commands and flags exist, their links lead somewhere, their configs load."""

import re
import shlex
from itertools import dropwhile
from pathlib import Path

import click
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from rayfin.deployments.cli.main import cli
from rayfin.deployments.client.engine_names import ENGINE
from rayfin.deployments.serve.server_args import AppArgs, split_args

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
VARIABLE = re.compile(r"[A-Z_]+=")
OTHERS = ("curl", "docker", "helm", "kubectl", "ray", "export", "pip", "git")
"""Programs that are not ours: what they are told is not looked at."""

SCRIPTS = [path for name in ("benchmarks", "tools/chaos") for path in ROOT.glob(f"{name}/*.py")]
"""Those whose own flags the documents name too."""

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, kind: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == kind]


def commands(page: Path) -> list[list[str]]:
    """The words of each command line, without comments and paths of the environment."""
    told = (text for text in blocks(page, "") if "►" not in text)  # that is a picture
    lines = (line for text in told for line in text.replace("\\\n", " ").splitlines())
    words = [shlex.split(line, comments=True) for line in lines if "|" not in line.split("#")[0]]
    found = [list(dropwhile(VARIABLE.match, own)) for own in words]
    return [[own[0].removeprefix(".venv/bin/"), *own[1:]] for own in found if own]


def parse(words: list[str]) -> None:
    """Reads a command line of ``rayfin`` as far as to run it.

    Raises:
        click.ClickException: there is no such command, flag or value.
    """
    command: click.Command = cli
    context = click.Context(cli, **cli.context_settings)  # a command keeps its names for help
    while isinstance(command, click.Group):
        _, found, words = command.resolve_command(context, words)
        assert found is not None
        command = found
    command.make_context(str(command.name), words, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_there(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    monkeypatch.chdir(tmp_path)  # where a command may look for it
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(page):
        match words:
            case ["rayfin", *rest]:
                parse(rest)
            case ["make", target, *_]:
                assert target in targets
            case ["serve", "deploy", config]:
                assert (ROOT / config).is_file()
            case ["python", "-m", "pytest", path, *_]:
                assert (ROOT / path).is_file()
            case ["python", path, *_] if path.endswith(".py"):
                assert (ROOT / path).is_file()
            case _:
                assert words[0] in (*OTHERS, ".", "serve"), words


def test_a_wrong_flag_is_found() -> None:
    for words in (["serve", "--max-modle-len", "5"], ["cache", "rest"], ["sleep", "--level", "2"]):
        with pytest.raises(click.ClickException):
            parse(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_in_the_text_are_there(page: Path) -> None:
    known = {
        option
        for command in cli.commands.values()
        for own in (getattr(command, "commands", None) or {"": command}).values()
        for param in own.params
        for option in (*param.opts, *param.secondary_opts)
    }
    for script in SCRIPTS:
        known |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', script.read_text()))
    known |= {"--help", *(option for param in cli.params for option in param.opts)}
    named = set(re.findall(r"`(?:rayfin [a-z ]*)?(--[a-z][a-z0-9-]*)", page.read_text()))
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_serve_config_loads() -> None:
    """Each that a page shows."""
    texts = blocks(ROOT / "docs" / "serving.md", "yaml")
    configs = [ServeDeploySchema.model_validate(yaml.safe_load(text)) for text in texts]
    assert len(configs) == 2
    for config in configs:
        applications = config.applications
        assert len({own.route_prefix for own in applications}) == len(applications)
        for application in applications:
            split_args(AppArgs(**application.args).model_dump())
            assert {own.name for own in application.deployments} <= {ENGINE}


def test_python_is_python() -> None:
    for page in PAGES:
        for text in blocks(page, "python"):
            compile(text, page.name, "exec")
