"""Triton's sampling draws what the CPU's does, token for token."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from rayfin.kernels.sampling.sample import sample as expected
from rayfin.kernels.shapes import SamplingRows

pytest.importorskip("triton")
from rayfin.kernels.triton import sample as module
from rayfin.kernels.triton.device import sample_kernels

NEVER = float("-inf")
V = 300


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 128)


def rows_of(
    count: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> SamplingRows:
    """The same settings in all rows, with other seeds and positions in each."""
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p),
        min_p=torch.full((count,), min_p),
        seed=torch.arange(count) * 977 - 2000,
        position=torch.arange(count) % 5 + 3,
        all_greedy=temperature == 0,
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
        any_min_p=min_p > 0,
    )


def check(logits: torch.Tensor, rows: SamplingRows, device: torch.device) -> torch.Tensor:
    tokens = module.sample(logits.to(device), to_device(rows, device)).cpu()
    assert tokens.tolist() == expected(logits, rows).tolist()
    return tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 7},
        {"top_p": 0.7},
        {"top_p": 0.0},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_the_same_tokens(device: torch.device, settings: dict[str, Any]) -> None:
    logits = 3 * torch.randn(3, V, generator=torch.Generator().manual_seed(5))
    check(logits, rows_of(3, **settings), device)


@pytest.mark.parametrize("settings", [{"top_k": 4}, {"top_p": 0.55}, {"temperature": 0.0}], ids=str)
def test_equal_logits(device: torch.device, settings: dict[str, Any]) -> None:
    """Top-k keeps all that equal the last one, top-p the first of them."""
    logits = torch.randint(-2, 3, (3, V), generator=torch.Generator().manual_seed(1)).half()
    check(logits, rows_of(3, **settings), device)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 3},
        {"top_k": 60, "top_p": 0.9},
        {"top_p": 0.3},
        {"top_p": 0.99, "min_p": 0.01},
        {"temperature": 0.2, "top_k": 20, "top_p": 0.95},
    ],
    ids=str,
)
@pytest.mark.parametrize("top", [1, 4, 64])
def test_top_tokens_of_blocks_may_not_be_all(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], top: int
) -> None:
    """Then the row is read again. Ties are within a block and across blocks."""
    monkeypatch.setattr(module, "TOP", top)
    logits = (3 * torch.randn(4, V, generator=torch.Generator().manual_seed(2))).round()
    logits[3, 20:] -= 40  # all that is kept lies in one block
    check(logits, rows_of(4, **settings), device)


@pytest.mark.gpu
@pytest.mark.parametrize("top", [1, 32])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 3},
        {"top_k": 60, "top_p": 0.9},
        {"top_p": 0.99, "min_p": 0.01},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ],
    ids=str,
)
def test_many_rows_of_a_real_vocabulary(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], top: int
) -> None:
    """Compiled, in blocks of their real size: tokens of all blocks are drawn."""
    monkeypatch.setattr(module, "BLOCK", 4096)
    monkeypatch.setattr(module, "TOP", top)
    logits = 3 * torch.randn(64, 20000, generator=torch.Generator().manual_seed(2))
    check(logits, rows_of(64, **settings), device)
    check(logits.round(), rows_of(64, **settings), device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's functions are replaced")
def test_common_settings_read_no_row_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the top tokens of the blocks are enough")

    monkeypatch.setattr(sample_kernels, "draw", refuse)
    logits = 3 * torch.randn(3, V, generator=torch.Generator().manual_seed(7))
    for settings in ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, {"top_p": 0.5}, {}):
        check(logits, rows_of(3, **settings), device)
    with pytest.raises(Exception, match="are enough"):
        check(logits, rows_of(3, top_k=200), device)


def test_forbidden_tokens_and_bad_rows(device: torch.device) -> None:
    logits = torch.full((5, V), NEVER)
    logits[0, 299] = -3.0
    logits[1, [130, 131]] = 1.0
    logits[3, 7] = float("nan")
    logits[4, 200] = float("inf")
    rows = rows_of(5)
    tokens = module.sample(logits.to(device), to_device(rows, device)).cpu()
    assert tokens[0] == 299 and tokens[1] in (130, 131)
    assert tokens[2:].tolist() == [-1, -1, -1]


def to_device(rows: SamplingRows, device: torch.device) -> SamplingRows:
    return SamplingRows(
        **{
            field.name: value.to(device) if isinstance(value, torch.Tensor) else value
            for field in fields(rows)
            for value in [getattr(rows, field.name)]
        }
    )
