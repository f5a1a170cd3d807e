"""Writing keys and values into slots, against the reference and the split-and-write form."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayfin.kernels import reference
from rayfin.kernels.attention.write_kv import write_kv


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("key_dim, value_dim", [(8, 8), (12, 8)])
def test_same_as_reference(page_size: int, key_dim: int, value_dim: int) -> None:
    torch.manual_seed(page_size)
    slots = torch.randperm(8 * page_size)[:7]
    key, value = torch.randn(7, 2, key_dim), torch.randn(7, 2, value_dim)
    k_pages = torch.randn(8, page_size, 2, key_dim)
    v_pages = torch.randn(8, page_size, 2, value_dim)
    k_expected, v_expected = k_pages.clone(), v_pages.clone()
    write_kv(key, value, k_pages, v_pages, slots)
    reference.write_kv(key, value, k_expected, v_expected, slots)
    assert torch.equal(k_pages, k_expected)
    assert torch.equal(v_pages, v_expected)
    assert torch.equal(k_pages.flatten(0, 1)[slots], key)


def test_converts_to_the_dtype_of_the_pages() -> None:
    pages = torch.zeros(2, 4, 1, 8, dtype=torch.bfloat16)
    token = torch.randn(1, 1, 8)
    write_kv(token, token, pages, pages.clone(), torch.tensor([5]))
    assert torch.equal(pages[1, 1], token[0].bfloat16())


def test_fp8_pages_keep_the_nearest_number_that_they_have() -> None:
    """The largest one of what is larger; a NaN stays; slots that are not named are untouched."""
    torch.manual_seed(0)
    spread = torch.exp2(torch.arange(60) % 20 - 11).view(5, 1, 12)
    key, value = torch.randn(5, 1, 12) * spread, torch.randn(5, 1, 12) * spread
    key[0, 0, :4] = torch.tensor([1e9, -float("inf"), 464.1, float("nan")])
    pages = [torch.full((2, 4, 1, 12), 7.0).to(torch.float8_e4m3fn) for _ in range(4)]
    slots = torch.tensor([5, 0, 3, 7, 2])
    write_kv(key, value, *pages[:2], slots)
    reference.write_kv(key, value, *pages[2:], slots)
    for given, wanted in zip(pages[:2], pages[2:], strict=True):
        torch.testing.assert_close(given.float(), wanted.float(), rtol=0, atol=0, equal_nan=True)
    assert pages[0].float()[1, 1, 0, :3].tolist() == [448.0, -448.0, 448.0]
    assert (pages[0].float()[1, 2] == 7).all()


@pytest.mark.parametrize("page_size", [1, 4])
def test_split_and_write_is_the_same(paged_case: Callable[..., Any], page_size: int) -> None:
    """V1's form: one tensor for all layers and chunks, split per request, copied page by page."""
    rows = [(3, 1), (4, 1), (0, 8), (4, 4), (5, 3)]  # chunks that end on a page boundary among them
    case = paged_case(rows, page_size=page_size)
    layers, tokens, heads, dim = 2, int(case.batch.query_start[-1]), 2, 8
    kv = torch.randn(2, layers, tokens, heads, dim)
    k_pages = torch.randn(layers, *case.k_pages.shape)
    v_pages = torch.randn(layers, *case.v_pages.shape)
    k_expected, v_expected = k_pages.clone(), v_pages.clone()
    reference.split_and_write_kv(
        kv,
        [chunk for _, chunk in rows],
        [cached for cached, _ in rows],
        case.batch.page_tables.tolist(),
        k_expected,
        v_expected,
    )
    for layer in range(layers):
        write_kv(kv[0, layer], kv[1, layer], k_pages[layer], v_pages[layer], case.batch.slots)
    assert torch.equal(k_pages, k_expected)
    assert torch.equal(v_pages, v_expected)
