"""Shared by all tests: quiet libraries, no network, tiny models that are built once per session."""

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# Here, not in a hook: conftest.py files further down import transformers before hooks run.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not Path("/dev/nvidiactl").exists():  # Triton reads it when it is imported, whoever does that
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``architecture`` runs once for each of `tiny_models.ARCHITECTURES`."""
    if "architecture" in metafunc.fixturenames:
        architectures = list(_module("tiny_models").ARCHITECTURES)
        metafunc.parametrize("architecture", architectures, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``gpu`` are skipped where torch finds none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@functools.cache
def _module(name: str, folder: str = "tests") -> ModuleType:
    """FOLDER/NAME.py: test folders are no package, and torch loads only where it is used."""
    path = Path(__file__).parents[1] / folder / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"rayfin_tests_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
