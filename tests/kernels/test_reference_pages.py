"""V0's page-level form, against dense causal attention; prompts that end on a page boundary."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayfin.kernels import reference

PAGE_SIZE = 4
LENGTHS = [[1], [3], [4], [5], [8], [3, 4, 5], [8, 1, 4, 12]]


def dense_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[n, H, D] each -> [n, H, D], fp64."""
    scores = torch.einsum("nhd,mhd->hnm", q.double(), k.double()) * scale
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, v.double())


def test_prompts_become_pages() -> None:
    ids, request_num_pages = reference.page_level_prefill_inputs(
        [[1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12]], page_size=4
    )
    assert request_num_pages == [1, 1, 2]
    assert ids.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7], [8, 9, 10, 11], [12, 0, 0, 0]]


def test_a_prompt_that_fills_its_last_page_is_written_whole() -> None:
    """The V0 form this comes from filled `len % page_size` = 0 places of that page."""
    ids, request_num_pages = reference.page_level_prefill_inputs([list(range(1, 9))], page_size=4)
    assert request_num_pages == [2]
    assert ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        reference.page_level_prefill_inputs([[1], []], page_size=4)


@pytest.mark.parametrize("length", range(1, 14))
def test_the_last_token_is_found(length: int) -> None:
    prompt = list(range(100, 100 + length))
    ids, (num_pages,) = reference.page_level_prefill_inputs([prompt], PAGE_SIZE)
    last = reference.last_token_index(length, PAGE_SIZE)
    assert ids[num_pages - 1, last] == prompt[-1]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_prefill_equals_dense_causal_attention(lengths: list[int]) -> None:
    """Tokens are embedded page by page, so a token that was not written would be missed."""
    torch.manual_seed(sum(lengths))
    vocabulary, heads, dim = 50, 2, 8
    embed_q, embed_k, embed_v = (torch.randn(vocabulary, heads, dim) for _ in range(3))
    prompts = [torch.randint(1, vocabulary, (n,)).tolist() for n in lengths]
    ids, request_num_pages = reference.page_level_prefill_inputs(prompts, PAGE_SIZE)
    out = reference.page_level_prefill_attention(
        embed_q[ids], embed_k[ids], embed_v[ids], request_num_pages, 0.35
    )  # [num_pages, page_size, H, D]
    first = 0
    for prompt, num_pages in zip(prompts, request_num_pages, strict=True):
        expected = dense_causal(embed_q[prompt], embed_k[prompt], embed_v[prompt], 0.35).float()
        got = out[first : first + num_pages].flatten(0, 1)[: len(prompt)]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        last = out[first + num_pages - 1, reference.last_token_index(len(prompt), PAGE_SIZE)]
        torch.testing.assert_close(last, expected[-1], rtol=1e-5, atol=1e-5)
        first += num_pages


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (3, 1)])
def test_decode_equals_gathered_attention(
    paged_case: Callable[..., Any], heads: int, kv_heads: int
) -> None:
    rows = [(0, 1), (3, 1), (4, 1), (7, 1), (18, 1)]  # 1, 4, 5, 8, 19 tokens: full pages among them
    case = paged_case(rows, page_size=PAGE_SIZE, heads=heads, kv_heads=kv_heads)
    out = reference.page_level_decode_attention(
        case.query,
        case.k_pages.nan_to_num(0.0),
        case.v_pages.nan_to_num(0.0),
        case.batch.page_tables,
        case.batch.kv_len,
        0.35,
    )
    torch.testing.assert_close(out, case.dense(scale=0.35).float(), rtol=1e-5, atol=1e-5)


def test_partials_combine_to_the_whole() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 6)
    visible = torch.rand(3, 11) > 0.3
    visible[:, 0] = True
    visible[1, 4:9] = False  # a part that this query does not see at all
    whole, _ = reference.partial_attention(q, k, v, visible, 0.5)
    parts = [
        reference.partial_attention(q, k[a:b], v[a:b], visible[:, a:b], 0.5)
        for a, b in [(0, 4), (4, 9), (9, 11)]
    ]
    assert parts[1][1][1].eq(float("-inf")).all()
    assert parts[1][0][1].eq(0).all()
    outs, lses = zip(*parts, strict=True)
    combined = reference.combine_partials(torch.stack(outs), torch.stack(lses))
    torch.testing.assert_close(combined, whole, rtol=1e-5, atol=1e-5)
