"""The folders form a chain, the package is exactly the folders it links, and files stay small."""

import ast
import builtins
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

slow = pytest.mark.slow(reason="starts a process that imports what it checks")

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "cache": set(),
    "actors": {"kernels", "cache"},
    "deployments": {"kernels", "cache", "actors"},
}
MAY_IMPORT_RAY = {
    "actors/metrics/hub.py",
    "actors/processes/registry.py",
    "actors/processes/worker_forker.py",
    "actors/processes/worker_forks.py",
    "actors/runner/parts/lora/load.py",
    "actors/runner/parts/vision/arrays.py",
    "actors/scheduler/runner_group.py",
    "actors/supervision/adoption.py",
    "actors/supervision/early_engine.py",
    "actors/supervision/placement.py",
    "actors/supervision/supervisor.py",
    "actors/weights/buckets.py",
    "actors/weights/coordinator_actor.py",
}
NO_TORCH = {f"actors/{name}.py" for name in ("config", "messages", "sampling_params", "errors")}
ERRORS = "actors/errors.py"
ERRORS_ELSEWHERE = {
    "cache/errors.py": "cache imports nothing",
    "kernels/cpu/library.py": "kernels import nothing",
    "deployments/cli/group.py": "subclasses of click's",
}


def _paths(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports, those inside functions and behind TYPE_CHECKING as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


class _Source(NamedTuple):
    """What the tests ask of a file; a tree of each would take hundreds of megabytes."""

    imports: set[str]
    globals: list[int]  # lines
    classes: list[tuple[str, list[str]]]  # names, and their bases


@cache
def _source(path: Path) -> _Source:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    return _Source(
        set(_imports(tree)),
        [node.lineno for node in nodes if isinstance(node, ast.Global)],
        [
            (node.name, [ast.unparse(base) for base in node.bases])
            for node in nodes
            if isinstance(node, ast.ClassDef)
        ],
    )


def _imported(path: Path) -> set[str]:
    return _source(path).imports


def _uses(path: Path, package: str) -> bool:
    return any(name.split(".")[0] == package for name in _imported(path))


def test_imports_are_found_wherever_they_are() -> None:
    source = "import a.b\nfrom c.d import e\ndef f():\n    import g\n    from h import i"
    assert set(_imports(ast.parse(source))) == {"a.b", "c.d.e", "g", "h.i"}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_only_what_they_may(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder, "__version__"}
    for path in _paths(folder):
        ours = {name.split(".")[1] for name in _imported(path) if name.startswith("rayfin.")}
        assert ours <= allowed, f"{_name(path)} imports {ours - allowed}"
        bare = {name.split(".")[0] for name in _imported(path)} & MAY_IMPORT.keys()
        assert not bare, f"{_name(path)} imports {bare} without rayfin"


def test_package_is_its_links() -> None:
    package = ROOT / "src" / "rayfin"
    links = {path.name: path.resolve() for path in package.iterdir() if path.is_symlink()}
    assert links == {folder: ROOT / folder for folder in MAY_IMPORT}
    files = {path.name for path in package.iterdir() if not path.is_symlink()}
    assert files - {"__pycache__"} == {"__init__.py", "data.py", "llm", "py.typed", "rollouts.py"}


def test_linked_folders_are_no_packages() -> None:
    """With an ``__init__.py`` a bare ``kernels`` would shadow Hugging Face's, in workers too."""
    assert not [folder for folder in MAY_IMPORT if (ROOT / folder / "__init__.py").exists()]


def test_ray_stays_in_the_shells() -> None:
    for path in _paths("kernels", "cache", "actors"):
        if path.name != "actor.py" and _name(path) not in MAY_IMPORT_RAY:
            assert not _uses(path, "ray"), f"{_name(path)} imports ray"


def test_torch_stays_in_the_data_plane() -> None:
    for path in [*_paths("cache", "actors/scheduler"), *(ROOT / name for name in NO_TORCH)]:
        if path.name != "kv_tensors.py":
            for package in ("torch", "transformers"):
                assert not _uses(path, package), f"{_name(path)} imports {package}"


@slow
def test_scheduler_process_has_no_torch() -> None:
    """Not even by way of others: importing it takes seconds and hundreds of megabytes."""
    paths = [*_paths("actors/scheduler"), *(ROOT / name for name in sorted(NO_TORCH))]
    modules = ["rayfin." + _name(path).removesuffix(".py").replace("/", ".") for path in paths]
    script = "import sys, importlib\n" + "".join(
        f"importlib.import_module({name!r})\nassert 'torch' not in sys.modules, {name!r}\n"
        for name in modules
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "src"
    )
    assert done.returncode == 0, done.stderr


@slow
def test_a_runner_imports_no_modelling_code() -> None:
    """transformers' models and its loader take seconds, and only reading a checkpoint needs them.

    Nor does the command that checks a model, or an ingress.
    """
    script = (
        "import sys, rayfin.actors.runner.actor, rayfin.actors.runner.model_runner\n"
        "assert 'transformers' not in sys.modules\n"
        "from rayfin.actors.config import EngineArgs\n"
        "from rayfin.actors.media.kinds import model_media\n"
        "from rayfin.deployments.serve.preflight import check_model, located\n"
        "check_model(EngineArgs(model='demo'))\n"
        "assert not model_media(located(EngineArgs(model='demo')))\n"
        "loaded = [name for name in sys.modules if name.startswith('transformers.')]\n"
        "heavy = {'transformers.modeling_utils', 'transformers.generation.utils'}\n"
        "assert not heavy & set(loaded), loaded"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "src"
    )
    assert done.returncode == 0, done.stderr


@slow
def test_an_inline_engine_needs_no_ray() -> None:
    """Importing it takes a good part of a second of a Python program's start."""
    script = (
        "import sys\nfrom rayfin import LLM\nimport rayfin.actors.runner.inline\n"
        "assert 'ray' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "src"
    )
    assert done.returncode == 0, done.stderr


def test_no_mixins_and_no_globals() -> None:
    for path in _paths(*MAY_IMPORT):
        source = _source(path)
        assert not source.globals, f"{_name(path)}:{source.globals[0]} says global"
        mixins = [name for name, _ in source.classes if name.endswith("Mixin")]
        assert not mixins, f"{_name(path)} has {mixins}"


def test_errors_are_one_tree() -> None:
    """Exceptions are defined in one file, whose docstring draws each below its base."""
    bases = {}
    for path in _paths(*MAY_IMPORT):
        for name, of in _source(path).classes:
            bases[name] = (of, _name(path))

    def is_error(name: str) -> bool:
        short = name.rpartition(".")[2]
        if short in bases:
            return any(is_error(base) for base in bases[short][0])
        builtin = getattr(builtins, short, None)
        known = isinstance(builtin, type) and issubclass(builtin, BaseException)
        return known or short.endswith(("Error", "Exception"))

    homes = {name: home for name, (_, home) in bases.items() if is_error(name)}
    strays = {name: home for name, home in homes.items() if home not in {ERRORS, *ERRORS_ELSEWHERE}}
    assert not strays
    drawing = ast.get_docstring(ast.parse((ROOT / ERRORS).read_text()), False) or ""
    drawn = re.findall(r"^    [│├└─ ]*([A-Z]\w+) ", drawing, re.M)
    assert sorted(drawn) == sorted(name for name, home in homes.items() if home == ERRORS)


@slow
def test_the_text_side_of_a_server_has_no_torch() -> None:
    """The command and an ingress of a plain model: importing torch takes seconds in each."""
    script = (
        "import sys\n"
        "from rayfin.actors.config import EngineArgs\n"
        "from rayfin.deployments import deploy\n"
        "from rayfin.deployments.serve import ingress, serving\n"
        "from rayfin.deployments.app import bind_app\n"
        "from rayfin.deployments.serve.model_args import ModelArgs\n"
        "from rayfin.deployments.serve.model_service import load_text, prepare_text\n"
        "from rayfin.deployments.serve.preflight import check_model\n"
        "from rayfin.deployments.serve.server_args import ServerArgs\n"
        "model = ModelArgs(ServerArgs(), EngineArgs(model='demo'))\n"
        "check_model(model.engine)\n"
        "assert 'transformers' not in sys.modules\n"
        "prepare_text([model])\n"
        "assert load_text(model).tokenizer.encode('Hello')\n"
        "heavy = {'torch', 'transformers.models.auto.configuration_auto'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "src"
    )
    assert done.returncode == 0, done.stderr
