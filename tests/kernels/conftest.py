"""Random paged batches, and attention over the same tokens laid out densely."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from rayfin.kernels.attention.write_kv import write_kv
from rayfin.kernels.shapes import PagedBatch


@dataclass(frozen=True)
class PagedCase:
    """A step's query with its pages, and each row's keys and values as they were before paging."""

    query: torch.Tensor  # [T, H, Dk]
    k_pages: torch.Tensor  # [num_pages, page_size, Hkv, Dk], NaN in every slot without an owner
    v_pages: torch.Tensor  # [num_pages, page_size, Hkv, Dv]
    batch: PagedBatch
    keys: list[torch.Tensor]  # R x [kv_len, Hkv, Dk]
    values: list[torch.Tensor]  # R x [kv_len, Hkv, Dv]

    def ahead(self, *spans: tuple[int, int, int]) -> "PagedCase":
        """The same where tokens ``first`` .. ``last`` of a row's chunk see each other both ways."""
        starts, lengths = self.batch.query_start_cpu, self.batch.kv_len_cpu
        sees_to = self.batch.positions.numpy().astype(np.int32)
        for row, first, last in spans:
            cached = int(lengths[row]) - int(starts[row + 1] - starts[row])
            sees_to[int(starts[row]) + first : int(starts[row]) + last + 1] = cached + last
        return replace(self, batch=replace(self.batch, sees_to=sees_to, scratch={}))

    def dense(
        self,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Textbook softmax attention in fp64, without pages: [T, H, Dv]."""
        outs = []
        for row in range(self.batch.rows):
            start, end = int(self.batch.query_start[row]), int(self.batch.query_start[row + 1])
            q = self.query[start:end].double()
            group = q.shape[1] // self.keys[row].shape[1]
            k = self.keys[row].double().repeat_interleave(group, dim=1)
            v = self.values[row].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            i = torch.arange(len(k) - len(q), len(k)).unsqueeze(1)
            j = torch.arange(len(k))
            visible = j <= i
            if self.batch.sees_to is not None:
                starts = self.batch.query_start_cpu
                seen = self.batch.sees_to[starts[row] : starts[row + 1]]
                visible = j <= torch.from_numpy(seen).unsqueeze(1)
            if window is not None:
                visible = visible & (j > i - window)
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                extra = sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
                scores = torch.cat([scores, extra], dim=-1)
            weights = torch.softmax(scores, dim=-1)[..., : len(k)]
            outs.append(torch.einsum("hnm,mhd->nhd", weights, v))
        return torch.cat(outs)


def build_case(
    rows: Sequence[tuple[int, int]],  # (cached tokens, chunk tokens); decoding rows first
    *,
    page_size: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    page_dtype: torch.dtype | None = None,
    seed: int = 0,
    decoding: int | None = None,
) -> PagedCase:
    """Rows over shuffled, scattered pages; slots without an owner hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    kv_len = [cached + chunk for cached, chunk in rows]
    pages_of = [-(-n // page_size) for n in kv_len]
    num_pages = sum(pages_of) + 3
    free = list(range(num_pages))
    random.Random(seed).shuffle(free)
    tables = torch.zeros(len(rows), max(pages_of) + 1, dtype=torch.int32)
    shape, stored = (num_pages, page_size, kv_heads), page_dtype or dtype
    k_pages = torch.full((*shape, key_dim), float("nan"), dtype=stored)
    v_pages = torch.full((*shape, value_dim), float("nan"), dtype=stored)
    keys, values, slots, positions = [], [], [], []
    for row, (cached, chunk) in enumerate(rows):
        own = [free.pop() for _ in range(pages_of[row])]
        tables[row, : len(own)] = torch.tensor(own, dtype=torch.int32)
        every = torch.tensor(
            [own[p // page_size] * page_size + p % page_size for p in range(kv_len[row])]
        )
        keys.append(normal(kv_len[row], kv_heads, key_dim))
        values.append(normal(kv_len[row], kv_heads, value_dim))
        write_kv(keys[row], values[row], k_pages, v_pages, every)
        slots.append(every[cached:])
        positions.append(torch.arange(cached, cached + chunk))
    starts = np.concatenate([[0], np.cumsum([chunk for _, chunk in rows])])
    if decoding is None:
        decoding = next((i for i, (_, chunk) in enumerate(rows) if chunk > 1), len(rows))
    batch = PagedBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor(kv_len, dtype=torch.int32),
        page_tables=tables,
        slots=torch.cat(slots),
        positions=torch.cat(positions),
        query_start_cpu=starts,
        kv_len_cpu=np.array(kv_len),
        decoding=decoding,
        page_size=page_size,
    )
    query = normal(int(starts[-1]), heads, key_dim)
    return PagedCase(query, k_pages, v_pages, batch, keys, values)


@pytest.fixture(scope="session")
def paged_case() -> Callable[..., PagedCase]:
    """`build_case`, as a fixture: test folders hold no importable modules."""
    return build_case
