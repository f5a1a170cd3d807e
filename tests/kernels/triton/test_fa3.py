"""FlashAttention 3 for prompts, by a module of its signature that torch computes."""

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from fake_fa3 import Package
from rayfin.kernels import reference

pytest.importorskip("triton")
from rayfin.kernels.attention.fa3 import MODULES, FlashAttention3, load_fa3
from rayfin.kernels.attention.select import select_attention, why_refused
from rayfin.kernels.attention.triton_backend import LAUNCHES, Sizes, TritonAttention

Case = Callable[..., Any]
Close = Callable[[torch.Tensor, torch.Tensor], None]
HALF = {"dtype": torch.float16}


@pytest.fixture
def package() -> Package:
    return Package()


@pytest.fixture
def attention(package: Package) -> TritonAttention:
    return TritonAttention(torch.device("cpu"), FlashAttention3(package.flash_attn_with_kvcache))


def attend(attention: TritonAttention, case: Any, **options: Any) -> torch.Tensor:
    return attention(case.query, case.k_pages, case.v_pages, case.batch, scale=0.35, **options)


def expected(case: Any, **options: Any) -> torch.Tensor:
    pages = case.k_pages, case.v_pages
    return reference.paged_attention(case.query, *pages, case.batch, scale=0.35, **options)


ROWS = {
    "prompts": [(0, 40), (13, 30), (70, 2)],
    "decodes and prompts": [(3, 1), (20, 1), (0, 33), (9, 1), (6, 12)],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 6}, {"window": 1}, {"sinks": torch.linspace(-1.0, 2.0, 4)}],
    ids=str,
)
@pytest.mark.parametrize("shape", [{}, {"page_size": 1}, {"kv_heads": 1}], ids=str)
def test_prompts_are_its_own(
    paged_case: Case,
    close: Close,
    package: Package,
    attention: TritonAttention,
    rows: str,
    options: dict[str, Any],
    shape: dict[str, int],
) -> None:
    decoding = 2 if rows.startswith("decodes") else 0
    case = paged_case(ROWS[rows], decoding=decoding, **HALF | shape)
    tried = len(package.queries)
    for _ in range(2):  # layers of a step
        close(attend(attention, case, **options), expected(case, **options))
    queries = len(case.query) - decoding
    assert package.queries[tried + 1 :] == [queries] * 2, "one trial, then two layers"
    first, second = package.tables[-2:]
    assert first is second, "a step's tables are made once"


def test_pages_behind_a_window_are_not_read(
    paged_case: Case, close: Close, package: Package, attention: TritonAttention
) -> None:
    """They may be others' by now, and hold numbers that are not finite."""
    window, case = 6, paged_case([(0, 40), (50, 30)], page_size=4, **HALF)
    result = expected(case, window=window)
    gone = case.batch.page_tables[1, :11].clone()  # the first query sees tokens 45 to 50
    case.k_pages[gone.long()] = case.v_pages[gone.long()] = float("nan")
    case.batch.page_tables[1, :11] = -1  # nor looked up
    close(attend(attention, case, window=window), result)
    seen = package.tables[-1]
    assert not set(seen[1].tolist()) & {-1, *gone.tolist()}
    assert torch.equal(seen[0], case.batch.page_tables[0])


def test_what_stays_with_triton(
    paged_case: Case, close: Close, package: Package, attention: TritonAttention
) -> None:
    """Decodes, few queries, and launches that a graph brings."""
    for rows in ([(3, 1), (20, 1)], [(3, 1), (60, 6)]):
        case = paged_case(rows, **HALF)
        close(attend(attention, case), expected(case))
    assert len(package.queries) == 1, "the trial"
    case = paged_case([(0, 40)], **HALF)
    close(attend(attention, case), expected(case))
    assert len(package.queries) == 2
    attention.cores = 2  # 4 heads of 40 queries are a tile of 128 and some
    case = paged_case([(0, 40)], **HALF)
    close(attend(attention, case), expected(case))
    launches = attention._launches(case.batch, Sizes(4, 2, 8, 8, torch.float16, None), 1)
    attention.cores = 1
    kept = replace(case.batch, scratch={LAUNCHES: lambda *_: launches})
    close(attend(attention, replace(case, batch=kept)), expected(case))
    assert len(package.queries) == 2


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, {}, "16 bits"),
    "other pages": ({"page_dtype": torch.float32}, {}, "pages are torch.float32"),
    "large pages": ({"page_size": 128}, {}, "pages of 128 tokens"),
    "soft cap": ({}, {"softcap": 2.0}, "does not support tanh softcapping"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_take(
    paged_case: Case,
    close: Close,
    package: Package,
    attention: TritonAttention,
    name: str,
) -> None:
    shape, options, why = REFUSED[name]
    case = paged_case([(0, 40), (3, 20)], **HALF | shape)
    close(attend(attention, case, **options), expected(case, **options))
    assert why in why_refused(attention)
    taken = paged_case([(0, 40)], **HALF)
    close(attend(attention, taken), expected(taken))
    assert not why_refused(attention), "other layers are taken"


@pytest.mark.parametrize("off_by", [0.1, float("nan")])
def test_one_that_computes_something_else_is_not_used(
    paged_case: Case, close: Close, caplog: pytest.LogCaptureFixture, off_by: float
) -> None:
    package = Package(off_by)
    kernel = FlashAttention3(package.flash_attn_with_kvcache)
    attention = TritonAttention(torch.device("cpu"), kernel)
    caplog.set_level(logging.INFO)
    for _ in range(2):
        case = paged_case([(0, 40)], **HALF)
        close(attend(attention, case), expected(case))
    assert len(package.queries) == 1, "tried once"
    assert "apart from torch" in why_refused(attention)
    assert caplog.text.count("does not take prompts of 4 heads of 8: ") == 1


def test_a_window_is_tried_apart(paged_case: Case, attention: TritonAttention) -> None:
    for window in (None, 5, 9):  # windows are cut short when a model is compared
        attend(attention, paged_case([(0, 40)], **HALF), window=window)
    assert len(attention.prefill._verdicts) == 2  # type: ignore[union-attr]


def test_where_it_is_found(
    package: Package, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device, capability = torch.device("cuda"), (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(
        "rayfin.kernels.attention.triton_backend.TritonAttention.__init__",
        lambda self, device, prefill=None: setattr(self, "prefill", prefill),
    )
    monkeypatch.setattr("rayfin.kernels.attention.select.can_use_triton", lambda _: True)

    def kernel(name: str) -> Any:
        chosen: Any = select_attention(device, torch.bfloat16, name)
        return chosen.prefill

    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    assert load_fa3(device) is None and kernel("auto") is None and not caplog.records
    with pytest.raises(ValueError, match="'fa3' needs a Hopper GPU .* and FlashAttention 3"):
        kernel("fa3")
    module: Any = ModuleType(MODULES[0])
    monkeypatch.setitem(sys.modules, MODULES[0], module)
    with pytest.raises(ValueError, match="'fa3': flash_attn_interface cannot be used"):
        kernel("fa3")
    caplog.set_level(logging.INFO)
    assert kernel("auto") is None and "Triton attends in prompts too" in caplog.text
    module.flash_attn_with_kvcache = package.flash_attn_with_kvcache
    assert isinstance(kernel("fa3"), FlashAttention3) and isinstance(
        kernel("auto"), FlashAttention3
    )
    assert kernel("triton") is None
    capability = (10, 0)
    with pytest.raises(ValueError, match="'fa3' needs a Hopper GPU"):
        kernel("fa3")
    assert kernel("auto") is None
