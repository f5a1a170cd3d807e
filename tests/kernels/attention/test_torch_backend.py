"""The torch backend against the reference and against dense softmax attention."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.attention import torch_backend as backend

Case = Callable[..., Any]
attend = backend.paged_attention

STEPS = {
    "decode": [(0, 1), (3, 1), (4, 1), (30, 1), (15, 1)],
    "equal decode": [(7, 1), (7, 1), (7, 1)],
    "prefill": [(0, 5), (0, 8), (0, 13)],
    "chunked": [(4, 5), (9, 7), (16, 16)],
    "mixed": [(3, 1), (20, 1), (0, 9), (6, 5), (7, 2)],
    "one token": [(0, 1)],
}


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_kind_of_step_equals_dense_attention(
    paged_case: Case, rows: list[tuple[int, int]], page_size: int
) -> None:
    case = paged_case(rows, page_size=page_size)
    out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35)
    expected = reference.paged_attention(
        case.query, case.k_pages, case.v_pages, case.batch, scale=0.35
    )
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, case.dense(scale=0.35).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (5, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("key_dim, value_dim", [(8, 8), (12, 8)], ids=["equal", "Dk != Dv"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 1},
        {"window": 6},
        {"window": 100},
        {"softcap": 1.5},
        {"sinks": True},
        {"window": 5, "softcap": 2.0, "sinks": True},
    ],
    ids=str,
)
def test_heads_dims_and_options(
    paged_case: Case,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    options: dict[str, Any],
) -> None:
    case = paged_case(
        STEPS["mixed"], heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim
    )
    if options.get("sinks"):
        options = options | {"sinks": torch.linspace(-1.0, 2.0, heads)}
    out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.5, **options)
    expected = reference.paged_attention(
        case.query, case.k_pages, case.v_pages, case.batch, scale=0.5, **options
    )
    assert out.shape == (case.query.shape[0], heads, value_dim)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, case.dense(scale=0.5, **options).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("option", [{"window": 6}, {"softcap": 1.5}, {"sinks": torch.ones(4)}])
def test_options_change_the_result(paged_case: Case, option: dict[str, Any]) -> None:
    case = paged_case(STEPS["mixed"])
    plain = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.5)
    other = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.5, **option)
    assert (plain - other).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 1.5}], ids=str)
def test_half_precision(paged_case: Case, dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = paged_case(STEPS["mixed"], dtype=dtype)
    out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35, **options)
    assert out.dtype == dtype
    expected = case.dense(scale=0.35, **options).float()
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


@settings(max_examples=40)
@given(data=st.data())
def test_random_steps(paged_case: Case, data: st.DataObject) -> None:
    decode = st.tuples(st.integers(0, 40), st.just(1))
    prefill = st.tuples(st.integers(0, 20), st.integers(1, 20))
    decoding = data.draw(st.lists(decode, max_size=4))
    rows = decoding + data.draw(st.lists(prefill, min_size=not decoding, max_size=3))
    kv_heads = data.draw(st.sampled_from([1, 2]))
    case = paged_case(
        rows,
        decoding=len(decoding),
        page_size=data.draw(st.sampled_from([1, 3, 4, 16])),
        heads=kv_heads * data.draw(st.sampled_from([1, 3])),
        kv_heads=kv_heads,
        seed=data.draw(st.integers(0, 1000)),
    )
    window = data.draw(st.one_of(st.none(), st.integers(1, 45)))
    out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35, window=window)
    expected = case.dense(scale=0.35, window=window).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_long_chunks_go_in_blocks(paged_case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "QUERY_BLOCK", 4)
    for window in (None, 3, 7):
        case = paged_case([(0, 19), (9, 8), (5, 13)])
        out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35, window=window)
        expected = case.dense(scale=0.35, window=window).float()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_decoding_rows_of_different_length_go_in_groups(
    paged_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "SPLIT_LENGTH", 16)
    monkeypatch.setattr(backend, "GATHER_TOKENS", 70)
    case = paged_case([(2, 1), (31, 1), (9, 1), (30, 1), (30, 1), (5, 1), (0, 4)])
    assert backend._split_by_length([3, 32, 10, 31, 31, 6]) == [[1, 3], [4], [0, 2, 5]]
    out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35)
    torch.testing.assert_close(out, case.dense(scale=0.35).float(), rtol=1e-5, atol=1e-5)


def test_layers_share_what_depends_on_the_step_only(paged_case: Case) -> None:
    case = paged_case(STEPS["mixed"])
    attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35)
    once = dict(case.batch.scratch)
    attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35)
    assert {k: id(v) for k, v in once.items()} == {k: id(v) for k, v in case.batch.scratch.items()}
    out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35, window=3)
    expected = case.dense(scale=0.35, window=3).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_a_bad_row_poisons_no_other(paged_case: Case) -> None:
    case = paged_case(STEPS["mixed"])
    good = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35)
    slots = case.batch.page_tables[1, :5].long()
    case.v_pages[slots] = float("nan")  # row 1's first pages
    out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35)
    assert out[1].isnan().all()
    others = [t for t in range(len(out)) if t != 1]
    torch.testing.assert_close(out[others], good[others], rtol=0, atol=0)


def test_query_and_pages_may_be_views(paged_case: Case) -> None:
    case = paged_case(STEPS["mixed"])
    wide = torch.cat([case.query.transpose(0, 1), case.query.transpose(0, 1)], dim=-1)
    query = wide[..., : case.query.shape[-1]].transpose(0, 1)
    assert not query.is_contiguous()
    out = attend(query, case.k_pages, case.v_pages, case.batch, scale=0.35)
    torch.testing.assert_close(out, case.dense(scale=0.35).float(), rtol=1e-5, atol=1e-5)


def test_other_pages_of_the_table_do_not_matter(paged_case: Case) -> None:
    case = paged_case(STEPS["decode"])
    out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35)
    tables = torch.cat([case.batch.page_tables, torch.full((5, 7), 2, dtype=torch.int32)], dim=1)
    wider = replace(case.batch, page_tables=tables, scratch={})
    again = attend(case.query, case.k_pages, case.v_pages, wider, scale=0.35)
    torch.testing.assert_close(out, again, rtol=0, atol=0)


@pytest.mark.parametrize("block", [4, 512])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 9}, {"softcap": 1.5}], ids=str)
def test_tokens_that_see_later_ones(
    paged_case: Case, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], block: int
) -> None:
    """An image in the middle of a chunk, at its start, and all of one; decoding rows beside."""
    monkeypatch.setattr(backend, "QUERY_BLOCK", block)
    case = paged_case([(3, 1), (0, 13), (6, 9), (7, 6)]).ahead((1, 3, 9), (2, 0, 4), (3, 0, 5))
    for function in (attend, reference.paged_attention):
        out = function(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35, **options)
        expected = case.dense(scale=0.35, **options).float()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    causal = replace(case.batch, sees_to=None, scratch={})
    out = attend(case.query, case.k_pages, case.v_pages, causal, scale=0.35, **options)
    assert (out - expected).abs().max() > 1e-2
