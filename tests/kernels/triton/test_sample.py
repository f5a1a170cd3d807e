"""Triton's sampling draws what the CPU's does, token for token."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from rayfin.kernels.sampling.sample import sample as expected
from rayfin.kernels.shapes import SamplingRows
from tiers import few

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


FILTERS: list[dict[str, Any]] = [
    {"top_k": 5},
    {"top_p": 0.4},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1e-6, "top_k": 20, "top_p": 0.9},
    {"temperature": 1e38, "top_k": 3},
]


def odd_logits(kind: str, vocabulary: int) -> torch.Tensor:
    """Rows in which few thresholds, or none, have some of a block's tokens above them."""
    normal = torch.randn(2, vocabulary, generator=torch.Generator().manual_seed(3))
    token = torch.arange(vocabulary)
    if kind == "equal":
        return torch.stack([torch.zeros(vocabulary), torch.full((vocabulary,), -7.25)])
    if kind == "nearly equal":
        return 5 + 1e-6 * normal
    if kind == "two values":
        return torch.stack([1.0 * (token % 3 == 0), 1.0 - 1.0 * (token % 50 == 49)])
    if kind == "a run of high ones":
        return normal + 30 * ((token >= 40) & (token < 59))
    if kind == "few are allowed":
        return normal.masked_fill(token % 97 != 5, NEVER)
    if kind == "one is allowed":
        return normal.masked_fill(token != vocabulary - 2, NEVER)
    if kind == "huge":
        return normal * 1e38
    return normal * 1e-39  # subnormal numbers


KINDS = (
    *("equal", "nearly equal", "two values", "a run of high ones", "few are allowed"),
    *("one is allowed", "huge", "tiny"),
)


@pytest.mark.parametrize(
    ("kind", "settings"), few([(kind, settings) for kind in KINDS for settings in FILTERS], 14)
)
def test_odd_logits(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    rows = rows_of(2, **settings)
    check(odd_logits(kind, 7), rows, device)
    monkeypatch.setattr(module, "TOP", 16)
    monkeypatch.setattr(module, "BLOCK", 2048)  # in groups of eight
    check(odd_logits(kind, 2500), rows, device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's functions are replaced")
@pytest.mark.parametrize("settings", FILTERS[:3], ids=str)
def test_a_run_of_high_ones_reads_no_row_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """More are above the first threshold than fit, since groups of them share a highest one."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the top tokens of the blocks are enough")

    monkeypatch.setattr(sample_kernels, "draw", refuse)
    monkeypatch.setattr(module, "BLOCK", 4096)
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(3))
    logits[:, 40:64] += 30
    logits[0, 64:200] += 25
    logits[2] = logits[2].bfloat16()
    check(logits, rows_of(3, **settings), device)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_bad_rows_beside_good_ones(device: torch.device, broken: float) -> None:
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(3))
    logits[1, 140] = broken
    logits[2, :] = broken
    tokens = check(logits, rows_of(4, top_k=9, top_p=0.8), device)
    assert tokens[1] == tokens[2] == -1 and min(tokens[0], tokens[3]) >= 0


def test_draws_depend_on_no_other_row(device: torch.device) -> None:
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(3)).round()
    rows = rows_of(5, temperature=0.8, top_k=9, top_p=0.8)
    order = torch.tensor([3, 0, 4])
    chosen = {
        field.name: getattr(rows, field.name)[order]
        for field in fields(rows)
        if isinstance(getattr(rows, field.name), torch.Tensor)
    }
    tokens = module.sample(logits.to(device), to_device(rows, device)).cpu()
    some = to_device(replace(rows, **chosen), device)
    assert module.sample(logits[order].to(device), some).tolist() == tokens[order].tolist()


def test_top_p_of_more_tokens_than_a_block_keeps(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-p is a part of the weight of all top_k tokens, also of those that have no key."""
    monkeypatch.setattr(module, "TOP", 4)
    logits = torch.zeros(8, V)
    logits[:, ::130] = 3.0
    logits[:, 1:100] = 2.0
    check(logits, rows_of(8, top_k=60, top_p=0.2), device)


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


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [50257, 128256, 262144])
@pytest.mark.parametrize("count", [1, 3, 256])
def test_real_vocabularies(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, vocabulary: int, count: int
) -> None:
    """In blocks of their real size; one of the vocabularies is no multiple of 16."""
    monkeypatch.setattr(module, "BLOCK", 4096)
    logits = 3 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(6))
    for settings in ({}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}):
        check(logits.bfloat16(), rows_of(count, **settings), device)


@pytest.mark.gpu
def test_a_hundred_thousand_draws(device: torch.device) -> None:
    """The tokens of the CPU's sampler, and as often as the distribution says."""
    count, logits = 100_000, torch.linspace(-2.0, 2.0, V)
    for settings in ({}, {"top_k": 40, "top_p": 0.9}):
        tokens = check(logits.expand(count, V).contiguous(), rows_of(count, **settings), device)
        assert tokens.min() >= 0
        if not settings:
            seen = torch.bincount(tokens, minlength=V) / count
            assert (seen - logits.softmax(0)).abs().max() < 0.002


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
