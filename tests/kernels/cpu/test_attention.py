"""The compiled attention against dense attention in float64, and against the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.kernels import reference
from rayfin.kernels.cpu.attention import CpuAttention
from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.shapes import PagedBatch

pytestmark = pytest.mark.slow(reason="every variant on every instruction set")

Case = Callable[..., Any]

MIXED = [(3, 1), (20, 1), (0, 9), (6, 5), (7, 2)]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 6},
    {"window": 100},
    {"softcap": 1.5},
    {"sinks": True},
    {"window": 5, "softcap": 2.0, "sinks": True},
]


@pytest.fixture(scope="session")
def attend(kernels: CpuKernels) -> CpuAttention:
    return CpuAttention(kernels)


def check(attend: CpuAttention, case: Any, tolerance: float = 1e-5, **options: Any) -> None:
    out = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35, **options)
    expected = case.dense(scale=0.35, **options)
    assert out.dtype == case.query.dtype
    torch.testing.assert_close(out.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "heads, kv_heads, key_dim, value_dim",
    [(4, 4, 8, 8), (6, 2, 12, 8), (5, 1, 64, 64), (16, 2, 80, 37), (3, 3, 128, 48)],
)
def test_heads_dims_and_options(
    paged_case: Case, attend: CpuAttention, heads: int, kv_heads: int, key_dim: int, value_dim: int
) -> None:
    case = paged_case(MIXED, heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)
    for options in OPTIONS:
        if options.get("sinks"):
            options = options | {"sinks": torch.linspace(-1.0, 2.0, heads)}
        check(attend, case, **options)


def test_long_rows(paged_case: Case, attend: CpuAttention) -> None:
    """Several tiles for a decoding row, several blocks of queries and of keys for a chunk."""
    rows = [(1300, 1), (511, 1), (512, 1), (0, 150), (700, 70), (130, 3)]
    case = paged_case(rows, page_size=16, heads=6)
    for options in OPTIONS:
        if options.get("sinks"):
            options = options | {"sinks": torch.linspace(-1.0, 2.0, 6)}
        check(attend, case, 1e-4, **options)


def test_tokens_that_see_later_ones(paged_case: Case, attend: CpuAttention) -> None:
    """Images of several tiles and of few tokens, in chunks that go on behind them or do not."""
    rows = [(30, 1), (0, 150), (700, 170), (130, 9), (5, 40)]
    spans = [(1, 20, 120), (2, 0, 99), (2, 110, 169), (3, 0, 8), (4, 3, 7), (4, 8, 20)]
    case = paged_case(rows, page_size=16, heads=6).ahead(*spans)
    for options in OPTIONS:
        if options.get("sinks"):
            options = options | {"sinks": torch.linspace(-1.0, 2.0, 6)}
        check(attend, case, 1e-4, **options)


def test_what_others_see_changes_no_token(paged_case: Case, attend: CpuAttention) -> None:
    case = paged_case([(30, 1), (64, 90)], page_size=16)
    causal = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.3)
    ahead = case.ahead((1, 20, 60)).batch
    out = attend(case.query, case.k_pages, case.v_pages, ahead, scale=0.3)
    image = slice(1 + 20, 1 + 60)  # its last token sees what it saw
    assert torch.equal(out[: image.start], causal[: image.start])
    assert torch.equal(out[image.stop :], causal[image.stop :])
    assert ((out - causal)[image].abs().amax(dim=(1, 2)) > 0).all()


def test_against_the_reference(paged_case: Case, attend: CpuAttention) -> None:
    case = paged_case(MIXED)
    arguments = (case.query, case.k_pages, case.v_pages, case.batch)
    expected = reference.paged_attention(*arguments, scale=0.35, window=7)
    out = attend(*arguments, scale=0.35, window=7)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_16_bit_pages(paged_case: Case, attend: CpuAttention, options: dict[str, Any]) -> None:
    check(attend, paged_case(MIXED, dtype=torch.bfloat16), 2e-2, **options)
    case = paged_case(MIXED, key_dim=36, value_dim=20, dtype=torch.bfloat16)
    exact = case.__class__(case.query.float(), *(getattr(case, name) for name in CASE_FIELDS))
    check(attend, exact, 1e-5, **options)  # pages of 16 bits, arithmetic of 32


CASE_FIELDS = ("k_pages", "v_pages", "batch", "keys", "values")


@settings(max_examples=15)
@given(data=st.data())
def test_random_steps(paged_case: Case, attend: CpuAttention, data: st.DataObject) -> None:
    decode = st.tuples(st.integers(0, 90), st.just(1))
    prefill = st.tuples(st.integers(0, 60), st.integers(1, 50))
    decoding = data.draw(st.lists(decode, max_size=4))
    rows = decoding + data.draw(st.lists(prefill, min_size=not decoding, max_size=3))
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    case = paged_case(
        rows,
        decoding=len(decoding),
        page_size=data.draw(st.sampled_from([1, 3, 4, 16])),
        heads=kv_heads * data.draw(st.sampled_from([1, 2, 3, 7])),
        kv_heads=kv_heads,
        key_dim=data.draw(st.sampled_from([8, 16, 24])),
        seed=data.draw(st.integers(0, 1000)),
    )
    check(attend, case, window=data.draw(st.one_of(st.none(), st.integers(1, 100))))


def test_a_decoding_row_is_the_same_in_any_company(paged_case: Case, attend: CpuAttention) -> None:
    rows = [(700, 1), (3, 1), (90, 1)]
    case = paged_case(rows, page_size=16)
    every = attend(case.query, case.k_pages, case.v_pages, case.batch, scale=0.3)
    alone = paged_case(rows[:1], page_size=16)
    for name in ("keys", "values"):
        getattr(alone, name)[0].copy_(getattr(case, name)[0])
    pages = alone.batch.page_tables[0]
    for position in range(701):
        source = int(case.batch.page_tables[0, position // 16]), position % 16
        target = int(pages[position // 16]), position % 16
        alone.k_pages[target] = case.k_pages[source]
        alone.v_pages[target] = case.v_pages[source]
    out = attend(case.query[:1], alone.k_pages, alone.v_pages, alone.batch, scale=0.3)
    assert torch.equal(out, every[:1])


def batch_of(tables: list[list[int]], lengths: list[int], chunk: int = 1) -> PagedBatch:
    """Rows whose last ``chunk`` tokens are computed, on pages of 16."""
    widest = max(len(pages) for pages in tables)
    padded = [pages + [0] * (widest - len(pages)) for pages in tables]
    starts = np.arange(len(tables) + 1, dtype=np.int32) * chunk
    none = torch.empty(0, dtype=torch.int64)
    return PagedBatch(
        query_start=torch.from_numpy(starts),
        kv_len=torch.tensor(lengths, dtype=torch.int32),
        page_tables=torch.tensor(padded, dtype=torch.int32),
        slots=none,
        positions=none,
        query_start_cpu=starts,
        kv_len_cpu=lengths,
        decoding=len(tables) if chunk == 1 else 0,
        page_size=16,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("heads, kv_heads, dim", [(9, 3, 64), (16, 2, 40)])
def test_rows_that_share_pages(
    attend: CpuAttention,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """Common prefixes of several depths: right, and the same to the last bit as each row alone."""
    torch.manual_seed(0)
    fresh = iter(torch.randperm(600).tolist())
    system = [next(fresh) for _ in range(12)]
    tenants = [system + [next(fresh) for _ in range(9)] for _ in range(2)]
    tables, lengths = [], []
    for row in range(25):
        prefix = system if row % 5 == 0 else tenants[row % 2]
        tables.append(prefix + [next(fresh) for _ in range(1 + row % 3)])
        lengths.append(16 * len(tables[-1]) - row % 7)
    tables.append(tables[0])  # the very same pages
    lengths.append(lengths[0])
    k_pages, v_pages = torch.randn(2, 600, 16, kv_heads, dim).to(dtype)
    query = torch.randn(len(tables), heads, dim)
    arguments: dict[str, Any] = {"scale": 0.2, "window": window}
    batch = batch_of(tables, lengths)
    out = attend(query, k_pages, v_pages, batch, **arguments)
    expected = reference.paged_attention(
        query, k_pages.float(), v_pages.float(), batch, **arguments
    )
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for row, (pages, length) in enumerate(zip(tables, lengths, strict=True)):
        own = batch_of([pages], [length])
        alone = attend(query[row : row + 1], k_pages, v_pages, own, **arguments)
        assert torch.equal(alone[0], out[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads, kv_heads, dim", [(6, 2, 24), (9, 3, 64), (7, 1, 128)])
@pytest.mark.parametrize(
    "options", [{}, {"window": 70}, {"window": 1}, {"softcap": 1.5, "sinks": True}], ids=str
)
def test_a_sequence_is_the_same_however_it_is_cut(
    attend: CpuAttention,
    options: dict[str, Any],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    """To the last bit: as one prompt, in chunks, and decoded token by token."""
    torch.manual_seed(0)
    pages = torch.randperm(30)[:20].tolist()
    k_pages, v_pages = torch.randn(2, 30, 16, kv_heads, dim).to(dtype)
    query = torch.randn(300, heads, dim)
    arguments: dict[str, Any] = {"scale": 0.3, **options}
    if options.get("sinks"):
        arguments["sinks"] = torch.linspace(-1.0, 2.0, heads)
    whole = attend(query, k_pages, v_pages, batch_of([pages], [300], 300), **arguments)
    for size in (1, 2, 50, 150):
        for end in range(size, 301, size):
            batch = batch_of([pages], [end], size)
            part = attend(query[end - size : end], k_pages, v_pages, batch, **arguments)
            assert torch.equal(part, whole[end - size : end]), (size, end)


@pytest.mark.parametrize("chunk", [1, 40])
def test_what_a_window_has_left_may_be_anything(attend: CpuAttention, chunk: int) -> None:
    """Its pages may be another's by now, whose keys and values are no numbers."""
    torch.manual_seed(0)
    k_pages, v_pages = torch.randn(2, 20, 16, 2, 24)
    query, batch = torch.randn(chunk, 6, 24), batch_of([list(range(20))], [310], chunk)
    arguments: dict[str, Any] = {"scale": 0.3, "window": 70}
    expected = attend(query, k_pages, v_pages, batch, **arguments)
    left = 310 - chunk - 70 + 1
    for pages in (k_pages, v_pages):
        pages.flatten(0, 1)[:left] = float("nan")
    assert torch.equal(attend(query, k_pages, v_pages, batch, **arguments), expected)
