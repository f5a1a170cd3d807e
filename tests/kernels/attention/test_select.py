"""Choosing an attention backend."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rayfin.kernels import reference
from rayfin.kernels.attention import torch_backend as backend
from rayfin.kernels.attention.select import SeeingAhead, page_types, select_attention

CPU = torch.device("cpu")


def test_names() -> None:
    assert select_attention(CPU, torch.float32) is backend.paged_attention
    assert select_attention(CPU, torch.bfloat16, name="torch") is backend.paged_attention
    assert select_attention(CPU, torch.float32, name="reference") is reference.paged_attention


def test_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'cuda'.*auto, cpu, triton, fa3, torch, reference"):
        select_attention(CPU, torch.float32, name="cuda")


def test_cpu_needs_its_kernels_and_a_dtype_of_theirs() -> None:
    with pytest.raises(ValueError, match="not built"):
        select_attention(CPU, torch.float32, name="cpu")
    with pytest.raises(ValueError, match="float16"):
        select_attention(CPU, torch.float16, name="cpu")


def test_triton_is_for_a_gpu() -> None:
    for name in ("triton", "fa3"):
        with pytest.raises(ValueError, match=f"'{name}' needs a GPU"):
            select_attention(CPU, torch.float32, name=name)
    pytest.importorskip("triton")
    from rayfin.kernels.attention.triton_backend import TritonAttention

    if torch.cuda.is_available():
        gpu = torch.device("cuda")
        assert isinstance(select_attention(gpu, torch.bfloat16), TritonAttention)
        assert select_attention(gpu, torch.bfloat16, name="torch") is backend.paged_attention


def test_torch_attends_where_tokens_see_later_ones(paged_case: Callable[..., Any]) -> None:
    def causal(query: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros_like(query)

    attend = SeeingAhead(causal)
    assert page_types(attend) == page_types(causal)
    case = paged_case([(0, 8)])
    arguments = (case.query, case.k_pages, case.v_pages)
    assert not attend(*arguments, case.batch, scale=0.3).any()
    ahead = case.ahead((0, 2, 5))
    expected = ahead.dense(scale=0.3).float()
    torch.testing.assert_close(attend(*arguments, ahead.batch, scale=0.3), expected)
