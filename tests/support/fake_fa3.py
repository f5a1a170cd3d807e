"""A package with FlashAttention 3's signature that torch computes."""

import torch

from rayfin.kernels.attention.torch_backend import paged_attention as torch_attention
from rayfin.kernels.shapes import PagedBatch


class Package:
    """Stands for an installed package; counts what it computes."""

    def __init__(self, off_by: float = 0.0) -> None:
        self.off_by = off_by
        self.tables: list[torch.Tensor] = []
        self.queries: list[int] = []

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        num_splits: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert causal and num_splits == 1
        assert softcap == 0.0, "This flash attention build does not support tanh softcapping."
        integers = (cache_seqlens, page_table, cu_seqlens_q)
        assert all(each.dtype == torch.int32 for each in integers)
        assert int(cu_seqlens_q[0]) == 0 and int(cu_seqlens_q[-1]) == len(q)
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
        assert page_table.stride(-1) == 1 and len(page_table) == len(cache_seqlens)
        left, right = window_size
        assert right == (-1 if left == -1 else 0)
        self.tables.append(page_table)
        self.queries.append(len(q))
        empty = torch.empty(0, dtype=torch.int64)
        batch = PagedBatch(
            query_start=cu_seqlens_q,
            kv_len=cache_seqlens,
            page_tables=page_table,
            slots=empty,
            positions=empty,
            query_start_cpu=cu_seqlens_q.tolist(),
            kv_len_cpu=cache_seqlens.tolist(),
            decoding=0,
            page_size=k_cache.shape[1],
        )
        window = None if left == -1 else left + 1
        out = torch_attention(
            q, k_cache, v_cache, batch, scale=softmax_scale, window=window, sinks=sinks
        )
        return out + self.off_by
