"""Groups of runners serve GGUF files: the tokens of transformers' own reading."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rank_groups import run_group
from rayfin.actors.runner.quantized.packed import CodedLinear
from rayfin.kernels.cpu.kernels import try_kernels

pytest.importorskip("gguf")

from gguf_files import converted, mixed, plain, write_gguf

pytestmark = pytest.mark.slow(reason="starts groups of two ranks")

PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 16))]


@pytest.mark.parametrize(
    ("family", "tied", "tensor", "stages"),
    [
        ("llama", False, 2, 1),
        ("qwen3", True, 2, 1),
        ("qwen3", True, 1, 2),
        ("qwen3moe", True, 2, 1),
    ],
)
def test_tokens(
    family: str,
    tied: bool,
    tensor: int,
    stages: int,
    tmp_path: Path,
    group: Callable[..., Any],
    request_of: Callable[..., Any],
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", mixed, family, tied=tied)
    model = plain(path)
    ranks = group(Path(converted(path)), tensor, stages, max_batch_tokens=9)
    requests = [request_of(key, prompt, 6) for key, prompt in enumerate(PROMPTS)]
    tokens, _, _ = run_group(ranks, requests, stagger=2)
    for key, prompt in enumerate(PROMPTS):
        made = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert tokens[key] == made[0, len(prompt) :].tolist()
    if try_kernels(1) is not None:
        for runner in ranks.runners:
            modules = runner._model.transformer.modules()
            assert any(isinstance(module, CodedLinear) for module in modules)
