"""Shared by all tests: quiet libraries, no network, tiny models that are built once per session.

``pytest --fast`` is the tier of `make check`: no test marked ``slow``, no file that takes long by
tests/durations.json (a path that is named is run all the same), three architectures, a few
examples of each property. ``pytest --all`` is that of `make test-all`: tests marked ``thorough``
or ``real`` too, and all cases and examples. Without either it is that of `make test`: of a test
with several parameters each pair of values once, and a quarter of a property's examples.
"""

import functools
import gc
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from run_order import FileDurations, seconds_of_files, sort_by_duration
from tiers import why_thorough, without_repeated_pairs

# Here, not in a hook: conftest.py files further down import transformers before hooks run.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYFIN_WEIGHTS_CACHE", "off")
# Threads of tiny products wait for each other more than they compute, on cores that others need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():  # Triton reads it when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")


TESTS = Path(__file__).parent
SLOW_FOLDERS = {
    "e2e": "starts Ray and Serve",
    "kernels/triton": "runs Triton kernels in the interpreter",
    "actors/runner/gpu": "runs Triton kernels in the interpreter",
    "benchmarks": "runs benchmarks once",
    "k8s": "validates every manifest",
    "tools": "waits for recorded loads",
}
FAST_FILE_SECONDS = 0.6  # of a whole run; longer files are left to `make test`
FAST_FILES = {"tests/test_house.py"}  # longer, and what a change of any room breaks first
FAST_ARCHITECTURES = ("llama", "gemma3_text", "mixtral")
FAST_EXAMPLES = 10
FEWER = 4  # of a property's examples `make test` takes one in so many, and no fewer than fast

# Here, for settings copy the profile: how long an example takes says how busy the machine is.
settings.register_profile("rayfin", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rayfin")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="the tier of `make check`")
    parser.addoption("--all", action="store_true", help="the tier of `make test-all`")
    parser.addoption(
        "--keep-durations", action="store_true", help="write tests/durations.json from this run"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keeps durations in the process that prints, not in the workers of xdist."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileDurations(config.getoption("--keep-durations")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from file_scheduling import FileScheduling

    return FileScheduling(config, log)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``architecture`` runs once for each of `tiny_models.ARCHITECTURES`."""
    if "architecture" in metafunc.fixturenames:
        architectures = list(_module("tiny_models").ARCHITECTURES)
        if metafunc.config.getoption("--fast"):
            architectures = [name for name in architectures if name in FAST_ARCHITECTURES]
        metafunc.parametrize("architecture", architectures, scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks slow folders, and picks the tier.

    Tests marked ``gpu`` are skipped where torch finds none.
    """
    for item in items:
        folder = _slow_folder(item.path)
        if folder is not None:
            item.add_marker(pytest.mark.slow(reason=SLOW_FOLDERS[folder]))
        reason = why_thorough(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.thorough(reason=reason))
    if config.getoption("--fast"):
        _deselect(config, items, _marked(items, "slow", "thorough", "real"))
        _take_examples(items, lambda count: FAST_EXAMPLES)
    elif not config.getoption("--all"):
        _deselect(config, items, _marked(items, "thorough", "real"))
        _deselect(config, items, without_repeated_pairs(items))
        _take_examples(items, lambda count: max(count // FEWER, FAST_EXAMPLES))
    sort_by_duration(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast tier does not import slow folders and files: their packages take seconds."""
    if not config.getoption("--fast"):
        return None
    file = collection_path.relative_to(TESTS.parent).as_posix()
    slow = file not in FAST_FILES and seconds_of_files().get(file, 0.0) > FAST_FILE_SECONDS
    return True if slow or _slow_folder(collection_path / "_") is not None else None


def _slow_folder(path: Path) -> str | None:
    """The slow folder that the file lies in, or None."""
    parents = {
        parent.relative_to(TESTS).as_posix() for parent in path.parents if TESTS in parent.parents
    }
    return next((folder for folder in SLOW_FOLDERS if folder in parents), None)


def _marked(items: list[pytest.Item], *markers: str) -> set[pytest.Item]:
    return {item for item in items if any(map(item.get_closest_marker, markers))}


def _deselect(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _take_examples(items: list[pytest.Item], examples: Callable[[int], int]) -> None:
    """Lowers each property's number of examples; it names its own, which no profile overrides."""
    for item in items:
        test = getattr(item, "obj", None)
        function = getattr(test, "__func__", test)
        given = getattr(function, "_hypothesis_internal_use_settings", None)
        # A property is parametrized into several items.
        if given is not None and not hasattr(function, "rayfin_all_examples"):
            function.rayfin_all_examples = given.max_examples
            if examples(given.max_examples) < given.max_examples:
                few = settings(given, max_examples=examples(given.max_examples))
                function._hypothesis_internal_use_settings = few


@functools.cache
def _module(name: str, folder: str = "tests") -> ModuleType:
    """FOLDER/NAME.py: test folders are no package, and torch loads only where it is used."""
    path = Path(__file__).parents[1] / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"rayfin_tests_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True, scope="module")
def frozen_heap() -> Iterator[None]:
    """Keeps the garbage collector away from what earlier modules have left.

    A full collection of thousands of tests' objects takes a second, within whichever test it falls.
    """
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(scope="session")
def depth(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """How often to repeat something: as often as asked in `make test-all`, else a quarter of it."""
    is_all = request.config.getoption("--all")
    return lambda count: count if is_all else max(1, count // FEWER)


@pytest.fixture(scope="session")
def tiny_models() -> ModuleType:
    """The module tests/tiny_models.py."""
    return _module("tiny_models")


@pytest.fixture(scope="session")
def simulate() -> ModuleType:
    """The module tools/simulate.py."""
    return _module("simulate", "tools")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """architecture -> TinyModel, made on first use."""

    @functools.cache
    def make(architecture: str) -> Any:
        return _module("tiny_models").TinyModel(architecture, tmp_path_factory.mktemp(architecture))

    return make
