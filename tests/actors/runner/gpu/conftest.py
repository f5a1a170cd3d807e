"""Larger tiles in Triton's interpreter, whose time goes by programs; tests/kernels has others."""

from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        return
    pytest.importorskip("triton")
    from rayfin.kernels.triton import products, sample

    programs = products._programs

    def large(rows: int, outputs: int, *sizes: Any) -> tuple[tuple[int], dict[str, Any]]:
        _, launch = programs(rows, outputs, *sizes)
        columns = 128
        return (-(-outputs // columns),), launch | {"COLUMNS": columns}

    monkeypatch.setattr(products, "_programs", large)
    monkeypatch.setattr(sample, "BLOCK", 512)


@pytest.fixture(scope="session")
def two_layers(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Qwen 3 with two layers, as a TinyModel: the interpreter's time goes by layers as well."""
    return tiny_models.TinyModel("qwen3", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=2)
