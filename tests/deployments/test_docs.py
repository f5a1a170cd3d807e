"""The pages name commands, flags, files and links that exist; their configs load."""

import re
import shlex
from itertools import dropwhile
from pathlib import Path

import click
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from rayfin.deployments.cli.main import cli
from rayfin.deployments.cli.vllm_options import REWRITES
from rayfin.deployments.client.engine_names import ENGINE
from rayfin.deployments.serve.server_args import AppArgs, split_args

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
]
VARIABLE = re.compile(r"[A-Z_]+=")
OTHERS = ("curl", "docker", "helm", "kubectl", "ray", "export", "pip", "git")
"""Programs of others, whose arguments are not checked."""

SCRIPTS = [path for name in ("benchmarks", "tools/chaos") for path in ROOT.glob(f"{name}/*.py")]
"""Scripts whose flags the pages name too."""

PLACES = (
    *("actors", "benchmarks", "cache", "deployments", "docs"),
    *("examples", "k8s", "kernels", "tests", "tools"),
)
FILE = re.compile(r"`((?:[\w-]+/)*[\w.-]+\.(?:py|cpp|h|md|ya?ml))`")

FILES = "".join(
    f"/{path.relative_to(ROOT).as_posix()}\n"
    for folder in (ROOT, *(ROOT / name for name in PLACES))
    for path in (folder.iterdir() if folder == ROOT else folder.rglob("*"))
    if path.is_file()
)
"""The files of the repository, a line each."""

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, kind: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == kind]


def commands(page: Path) -> list[list[str]]:
    """Returns the words of each command line, without comments and the environment's path."""
    texts = (text for text in blocks(page, "") if not {"►", "◄"} & {*text})  # pictures
    lines = (line for text in texts for line in text.replace("\\\n", " ").splitlines())
    words = [shlex.split(line, comments=True) for line in lines if "|" not in line.split("#")[0]]
    named = [list(dropwhile(VARIABLE.match, line)) for line in words]
    return [[line[0].removeprefix(".venv/bin/"), *line[1:]] for line in named if line]


def parse(words: list[str]) -> None:
    """Parses a command line of ``rayfin`` without running it.

    Raises:
        click.ClickException: the command, flag or value does not exist.
    """
    command: click.Command = cli
    context = click.Context(cli, **cli.context_settings)  # a command keeps its names for help
    while isinstance(command, click.Group):
        _, subcommand, words = command.resolve_command(context, words)
        assert subcommand is not None
        command = subcommand
    command.make_context(str(command.name), words, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_there(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "calls.jsonl").touch()
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
        for leaf in (getattr(command, "commands", None) or {"": command}).values()
        for param in leaf.params
        for option in (*param.opts, *param.secondary_opts)
    }
    for script in SCRIPTS:
        known |= set(re.findall(r'(?:add_argument|option)\(\s*"(--[a-z-]+)"', script.read_text()))
    known |= {"--help", *(option for param in cli.params for option in param.opts)}
    known |= set(REWRITES)  # vLLM's switches that stand for a setting with a value
    named = set(re.findall(r"`(?:rayfin [a-z ]*)?(--[a-z][a-z0-9-]*)", page.read_text()))
    assert named <= known


def anchors(page: Path) -> set[str]:
    """Returns the anchors that a reader of Markdown makes from the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_in_the_text_are_there(page: Path) -> None:
    """A path may begin inside a folder; a bare name may be any file's."""
    missing = [name for name in FILE.findall(page.read_text()) if f"/{name}\n" not in FILES]
    assert not missing, missing


def test_the_tour_is_two_pages() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    lines = text.splitlines()
    assert len(lines) <= 110
    assert max(map(len, lines)) <= 110
    files = re.findall(r"^(\d+)\. `([^`]+)`", text, re.MULTILINE)
    assert [int(number) for number, _ in files] == list(range(1, len(files) + 1))
    assert 30 <= len(files) <= 45
    assert all((ROOT / name).is_file() for _, name in files)


def test_the_serve_configs_load() -> None:
    texts = blocks(ROOT / "docs" / "serving.md", "yaml")
    configs = [ServeDeploySchema.model_validate(yaml.safe_load(text)) for text in texts]
    assert len(configs) == 2
    for config in configs:
        applications = config.applications
        assert len({one.route_prefix for one in applications}) == len(applications)
        for application in applications:
            split_args(AppArgs(**application.args).model_dump())
            assert {one.name for one in application.deployments} <= {ENGINE}


def test_python_is_python() -> None:
    for page in PAGES:
        for text in blocks(page, "python"):
            compile(text, page.name, "exec")


def test_sections_of_scripts_are_there() -> None:
    """A script with several sections is named with one of them."""
    named: dict[str, set[str]] = {}
    for page in (*PAGES, *(ROOT / "docs" / "benchmarks").glob("*.md")):
        for script, word in re.findall(
            r"(?<!tests/)benchmarks/(\w+)\.py ?([\w-]*)", page.read_text()
        ):
            named.setdefault(script, set()).add(word)
    for script, words in named.items():
        run = re.search(r"\brun\(__doc__, (.*)\)", (ROOT / f"benchmarks/{script}.py").read_text())
        if run:
            assert words <= set(run[1].replace("_", "-").split(", ")), script
