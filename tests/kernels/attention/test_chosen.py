"""Attention over chosen positions against dense attention with all others masked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayfin.kernels.attention import chosen as module
from rayfin.kernels.attention.chosen import attend_chosen, rows_of_tokens

Case = Callable[..., Any]
ROWS = [(3, 1), (20, 1), (0, 9), (6, 5)]


def _expected(case: Any, chosen: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Each token's softmax over the keys that it chose, one token after the other, in fp64."""
    out = []
    for token, row in enumerate(rows_of_tokens(case.batch).tolist()):
        seen = [p for p in chosen[token].tolist() if 0 <= p <= int(case.batch.positions[token])]
        group = case.query.shape[1] // case.keys[row].shape[1]
        k = case.keys[row][seen].double().repeat_interleave(group, 1)
        v = case.values[row][seen].double().repeat_interleave(group, 1)
        scores = torch.einsum("hd,mhd->hm", case.query[token].double(), k) * 0.35
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], 1)
        out.append(torch.einsum("hm,mhd->hd", scores.softmax(-1)[:, : len(seen)], v))
    return torch.stack(out)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_equals_dense_attention(
    page_size: int, sinks: bool, at_once: int, paged_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLOATS_AT_ONCE", at_once)
    case = paged_case(ROWS, page_size=page_size)
    torch.manual_seed(0)
    picks = []
    for position in case.batch.positions.tolist():
        others = torch.randperm(position)[:4]  # and one that lies behind, and no more
        own = torch.cat([torch.tensor([position, position + 1]), others])
        picks.append(torch.nn.functional.pad(own, (0, 6 - len(own)), value=-1))
    chosen = torch.stack(picks).int()
    logits = torch.randn(case.query.shape[1]) if sinks else None
    expected = _expected(case, chosen, logits)
    pages = (case.k_pages, case.v_pages, case.batch)
    for tokens in (torch.arange(len(case.query)), torch.tensor([1, 4, 12])):
        some = (case.query[tokens], *pages, chosen[tokens])
        out = attend_chosen(*some, tokens=tokens, scale=0.35, sinks=logits)
        torch.testing.assert_close(out.double(), expected[tokens], rtol=1e-5, atol=1e-5)


def test_fp8_pages(paged_case: Case) -> None:
    case = paged_case(ROWS, page_size=4)
    chosen = torch.arange(8).repeat(len(case.query), 1)
    small_k, small_v = (pages.to(torch.float8_e4m3fn) for pages in (case.k_pages, case.v_pages))
    settings: Any = {"tokens": torch.arange(len(case.query)), "scale": 0.3}
    out = attend_chosen(case.query, small_k, small_v, case.batch, chosen, **settings)
    wide = (small_k.float(), small_v.float())
    assert torch.equal(out, attend_chosen(case.query, *wide, case.batch, chosen, **settings))
