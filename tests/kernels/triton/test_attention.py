"""Triton's paged attention against the reference: one feature at a time, small shapes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.kernels import reference
from rayfin.kernels.attention.torch_backend import paged_attention as torch_attention
from rayfin.kernels.shapes import PagedBatch

pytest.importorskip("triton")
from rayfin.kernels.attention.triton_backend import (
    CAST,
    OCTETS,
    PAIRS,
    PTX,
    Forms,
    Sizes,
    TritonAttention,
)

Case = Callable[..., Any]
Close = Callable[[torch.Tensor, torch.Tensor], None]
FP8 = torch.float8_e4m3fn
MIXED = [(3, 1), (20, 1), (0, 9), (6, 5)]

FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "decode": ({"rows": [(0, 1), (3, 1), (70, 1)]}, {}),
    "prefill": ({"rows": [(0, 5), (0, 70)]}, {}),
    "mixed": ({}, {}),
    "pages of 1": ({"page_size": 1}, {}),
    "pages of 3": ({"page_size": 3}, {}),
    "group of 3": ({"heads": 6, "kv_heads": 2}, {}),
    "one key head": ({"heads": 5, "kv_heads": 1}, {}),
    "no groups": ({"heads": 2, "kv_heads": 2}, {}),
    "key and value sizes": ({"key_dim": 24, "value_dim": 8}, {}),
    "half": ({"dtype": torch.float16}, {}),
    "half pages": ({"page_dtype": torch.float16}, {}),
    "float32 pages": ({"dtype": torch.float16, "page_dtype": torch.float32}, {}),
    "fp8 pages": ({"page_dtype": FP8}, {}),
    "window": ({}, {"window": 6}),
    "window of 1": ({}, {"window": 1}),
    "soft cap": ({}, {"softcap": 1.5}),
    "sinks": ({}, {"sinks": torch.linspace(-1.0, 2.0, 4)}),
    "all": (
        {"dtype": torch.float16},
        {"window": 5, "softcap": 2.0, "sinks": torch.linspace(-1.0, 2.0, 4)},
    ),
    "all, fp8 pages": (
        {"dtype": torch.float16, "page_dtype": FP8, "key_dim": 24, "page_size": 3},
        {"window": 5, "softcap": 2.0, "sinks": torch.linspace(-1.0, 2.0, 4)},
    ),
}


FORMS = {
    "two loops": Forms(two_loops=True, per_key=True),
    "pairs": Forms(fp8=PAIRS),
    "octets": Forms(two_loops=True, per_key=True, fp8=OCTETS),
    "by page": Forms(by_page=True),
    "octets by page": Forms(two_loops=True, per_key=True, fp8=OCTETS, by_page=True),
    "PTX": Forms(two_loops=True, per_key=True, fp8=PTX),
}


def formed(device: torch.device, form: str) -> TritonAttention:
    """The attention in a form that `trials` names; without a GPU not in PTX."""
    if form == "PTX" and device.type == "cpu":
        pytest.skip("the interpreter has no PTX")
    attention = TritonAttention(device)
    attention.forms = FORMS[form]
    if attention.forms.fp8 != CAST and FP8 not in attention.page_types:
        pytest.skip("this GPU does not convert fp8")
    return attention


def on(device: torch.device, batch: PagedBatch) -> PagedBatch:
    moved = {
        name: getattr(batch, name).to(device)
        for name in ("query_start", "kv_len", "page_tables", "slots", "positions")
    }
    return replace(batch, **moved, scratch={})


def attend(
    attention: TritonAttention, case: Any, device: torch.device, **options: Any
) -> torch.Tensor:
    if "sinks" in options:
        options = options | {"sinks": options["sinks"].to(device)}
    pages = case.k_pages.to(device), case.v_pages.to(device)
    return attention(
        case.query.to(device), *pages, on(device, case.batch), scale=0.35, **options
    ).cpu()


def expected(case: Any, **options: Any) -> torch.Tensor:
    return reference.paged_attention(
        case.query, case.k_pages, case.v_pages, case.batch, scale=0.35, **options
    )


@pytest.mark.parametrize("feature", FEATURES)
def test_features(paged_case: Case, device: torch.device, close: Close, feature: str) -> None:
    shape, options = FEATURES[feature]
    case, attention = paged_case(**({"rows": MIXED} | shape)), TritonAttention(device)
    if case.k_pages.dtype not in attention.page_types:
        pytest.skip("this GPU does not convert fp8")
    out = attend(attention, case, device, **options)
    close(out, expected(case, **options))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 40}, {"softcap": 2.0}, {"sinks": torch.linspace(-1.0, 2.0, 4)}],
    ids=str,
)
@pytest.mark.parametrize("dims", [{}, {"key_dim": 24, "value_dim": 12}], ids=str)
def test_forms(
    paged_case: Case,
    device: torch.device,
    close: Close,
    form: str,
    options: dict[str, Any],
    dims: dict[str, int],
) -> None:
    """Rows with whole blocks and without, split and not; decodes, prompts and chunks."""
    attention = formed(device, form)
    attention.cores = 16
    shape = {"page_size": 16, "dtype": torch.float16} | dims
    if attention.forms.fp8 != CAST:
        shape["page_dtype"] = FP8
    rows = [(0, 1), (31, 1), (170, 1), (0, 5), (63, 2), (40, 70)]
    case = paged_case(rows, **shape)
    close(attend(attention, case, device, **options), expected(case, **options))


@pytest.mark.parametrize("page_size", [3, 8, 16, 32, 64])
def test_page_ids_are_read_by_page(
    paged_case: Case,
    device: torch.device,
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits, of rows that end within a page, with a block, and are split."""
    seen: list[bool] = []
    attention, plain = formed(device, "by page"), TritonAttention(device)
    reads_by_page = attention._reads_by_page

    def read(*sizes: Any) -> bool:
        seen.append(reads_by_page(*sizes))
        return seen[-1]

    monkeypatch.setattr(attention, "_reads_by_page", read)
    attention.cores = plain.cores = 16
    rows = [(0, 1), (31, 1), (32, 1), (300, 1), (0, 5), (63, 2), (64, 70)]
    case = paged_case(rows, page_size=page_size, dtype=torch.float16)
    outs = [attend(each, case, device) for each in (attention, plain)]
    assert torch.equal(*outs)
    decodes, prompts = seen
    assert decodes == (page_size != 3) and prompts == (page_size >= 16)
    assert not torch.equal(outs[0], attend(attention, case, device, window=40))
    assert seen[2:] == [False, False]


@pytest.mark.parametrize("form", FORMS)
def test_forms_hold_every_number(paged_case: Case, device: torch.device, form: str) -> None:
    """Queries far from one, rows of zeros, and pages with each e4m3 number, NaN among them."""
    attention = formed(device, form)
    plain = TritonAttention(device)
    case = paged_case(
        [(60, 1), (60, 1), (60, 1)], page_size=16, dtype=torch.float16, page_dtype=FP8
    )
    octets = torch.arange(256, dtype=torch.uint8)
    finite = octets[(octets & 0x7F) != 0x7F].view(FP8)
    own = case.batch.page_tables[0, :4].long()
    for pages in (case.k_pages, case.v_pages):
        numbers = finite.repeat(9)[: pages[own].numel()]
        pages[own] = numbers.view(pages[own].shape)
    if device.type == "cuda":  # to the interpreter these bits are 480
        case.v_pages[case.batch.page_tables[2, 0].long(), 5, 0, 3] = float("nan")
    query = case.query * torch.tensor([1e-3, 0.0, 100.0], dtype=torch.float16).view(3, 1, 1)
    case = replace(case, query=query)
    given, wanted = (attend(each, case, device).float() for each in (attention, plain))
    assert not given[:2].isnan().any()
    torch.testing.assert_close(given, wanted, rtol=3e-3, atol=3e-3, equal_nan=True)


@pytest.mark.parametrize(
    ("page_dtype", "options"),
    [(None, {}), (None, {"window": 150}), (None, {"sinks": torch.ones(4)}), (FP8, {})],
    ids=str,
)
def test_long_rows_are_split_and_merged(
    paged_case: Case,
    device: torch.device,
    close: Close,
    page_dtype: torch.dtype | None,
    options: dict[str, Any],
) -> None:
    attention = TritonAttention(device)
    attention.cores = 32
    if page_dtype not in (None, *attention.page_types):
        pytest.skip("this GPU does not convert fp8")
    case = paged_case([(300, 1), (5, 1), (270, 3)], page_size=16, page_dtype=page_dtype)
    batch = on(device, case.batch)
    pages = case.k_pages.to(device), case.v_pages.to(device)
    if "sinks" in options:
        options = {"sinks": options["sinks"].to(device)}
    out = attention(case.query.to(device), *pages, batch, scale=0.35, **options)
    (launches,) = batch.scratch.values()
    assert [len(launch.part_out) > 0 for launch in launches] == [True, True]
    assert not any(launch.arrived.any() for launch in launches), "another layer counts anew"
    close(
        out.cpu(),
        expected(case, **{k: getattr(v, "cpu", lambda v=v: v)() for k, v in options.items()}),
    )


def test_layers_share_launches_and_a_bad_row_poisons_no_other(
    paged_case: Case, device: torch.device
) -> None:
    case, attention = paged_case(MIXED), TritonAttention(device)
    good = attend(attention, case, device)
    case.v_pages[case.batch.page_tables[1, :5].long()] = float("nan")
    out = attend(attention, case, device)
    assert out[1].isnan().all()
    others = [token for token in range(len(out)) if token != 1]
    torch.testing.assert_close(out[others], good[others], rtol=0, atol=0)


def test_query_may_be_a_part_of_something_wider(
    paged_case: Case, device: torch.device, close: Close
) -> None:
    """As in the result of a merged projection: heads side by side, keys and values behind."""
    case = paged_case(MIXED)
    tokens, heads, dim = case.query.shape
    wide = torch.randn(tokens, heads * dim + 20)
    wide[:, : heads * dim] = case.query.flatten(1)
    view = wide[:, : heads * dim].view(tokens, heads, dim)
    out = attend(TritonAttention(device), replace(case, query=view), device)
    close(out, expected(case))


@pytest.mark.gpu
@pytest.mark.parametrize("form", [None, "two loops"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sizes_of_real_heads(
    paged_case: Case, device: torch.device, dtype: torch.dtype, form: str | None
) -> None:
    """Rows long enough to be split; bf16 products are wrong in the interpreter."""
    attention = TritonAttention(device) if form is None else formed(device, form)
    rows = [(700, 1), (3, 1), (260, 150)]
    case = paged_case(
        rows, page_size=16, heads=16, kv_heads=8, key_dim=128, value_dim=128, dtype=dtype
    )
    out = attend(attention, case, device)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        out.float(), case.dense(scale=0.35).float(), rtol=tolerance, atol=tolerance
    )


@pytest.mark.gpu
@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_pages_of_real_heads(
    paged_case: Case, device: torch.device, dtype: torch.dtype, form: str | None
) -> None:
    """Beside torch's attention over the same pages, in float32."""
    attention = TritonAttention(device) if form is None else formed(device, form)
    if FP8 not in attention.page_types:
        pytest.skip("this GPU does not convert fp8")
    sizes = {"page_size": 16, "heads": 16, "kv_heads": 8, "key_dim": 128, "value_dim": 128}
    case = paged_case([(700, 1), (3, 1), (260, 150)], dtype=dtype, page_dtype=FP8, **sizes)
    out = attend(attention, case, device)
    wanted = torch_attention(case.query.float(), case.k_pages, case.v_pages, case.batch, scale=0.35)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("rows", [8, 80])
def test_the_same_bits_each_time(
    paged_case: Case, device: torch.device, form: str | None, rows: int
) -> None:
    """Rows of many lengths, most of them split: parts that are merged too early would differ."""
    attention = TritonAttention(device) if form is None else formed(device, form)
    sizes = {"page_size": 16, "heads": 16, "kv_heads": 8, "key_dim": 128, "value_dim": 128}
    if attention.forms.fp8 != CAST:
        sizes["page_dtype"] = FP8
    lengths = [(100 + 97 * row % 900, 1) for row in range(rows)]
    case = paged_case(lengths, dtype=torch.bfloat16, **sizes)
    batch, pages = on(device, case.batch), (case.k_pages.to(device), case.v_pages.to(device))
    query = case.query.to(device)
    first = attention(query, *pages, batch, scale=0.09)
    for _ in range(500):
        assert torch.equal(attention(query, *pages, batch, scale=0.09), first)
    (launches,) = batch.scratch.values()
    assert not any(launch.arrived.any() for launch in launches)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [None, "two loops"])
@pytest.mark.parametrize("window", [None, 70_000])
def test_long_rows(
    paged_case: Case, device: torch.device, form: str | None, window: int | None
) -> None:
    """131,072 keys alone, and beside short rows."""
    attention = TritonAttention(device) if form is None else formed(device, form)
    for rows in ([(131_071, 1)], [(131_071, 1), *[(10 + row, 1) for row in range(64)], (9, 60)]):
        shape = {"page_size": 16, "heads": 4, "kv_heads": 2, "key_dim": 64, "value_dim": 64}
        case = paged_case(rows, dtype=torch.float16, **shape)
        options = {} if window is None else {"window": window}
        out = attend(attention, case, device, **options).float()
        wanted = case.dense(scale=0.35, **options).float()
        torch.testing.assert_close(out, wanted, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("group", [1, 3, 8, 128])
@pytest.mark.parametrize("dim", [16, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_tiles_are_as_high_as_a_warp_group(
    group: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Hopper's products take 64 rows at least; tiles are full of queries, up to whole groups."""
    shape = TritonAttention(device).prefill_shape(Sizes(group, 1, dim, dim, dtype, None))
    assert shape.rows >= 64 and shape.rows & (shape.rows - 1) == 0
    assert shape.rows - group < shape.queries * group <= shape.rows
