"""What every paged attention backend takes and gives.

Paged attention (Kwon et al., SOSP 2023, "PagedAttention") keeps the keys and values of a request in
fixed pages that may lie anywhere in one big tensor; a page table per request says where. One call
serves a mixed step: rows that decode one token and rows that prefill a chunk, packed along `T`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

HostInts = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """One step's rows, as attention sees them.

    Decoding rows come first, then prefill rows; their tokens are packed along T. Build a new
    one for every step: all layers share it, and `scratch` keeps what a backend derived from it.
    """

    query_start: torch.Tensor  # [R + 1] int32, where each row's chunk starts in T (last = T)
    kv_len: torch.Tensor  # [R] int32, tokens visible to the row's last one: cached + this chunk
    page_tables: torch.Tensor  # [R, P] int32, page ids; any valid page id past the row's own pages
    slots: torch.Tensor  # [T] int64, page_id * page_size + offset: where each token's K, V go
    positions: torch.Tensor  # [T] int64, index of the token in its request
    query_start_cpu: HostInts  # [R + 1], host copy of query_start: no device sync to read it
    kv_len_cpu: HostInts  # [R], host copy of kv_len
    decoding: int  # the first `decoding` rows are chunks of one token
    page_size: int  # tokens per page
    scratch: dict[Any, Any] = field(default_factory=dict, repr=False)  # a backend's own, per step

    @property
    def rows(self) -> int:
        """How many rows the batch has (R)."""
        return len(self.kv_len_cpu)


class PagedAttention(Protocol):
    """The function that every backend gives."""

    def __call__(
        self,
        query: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of each row's chunk over all tokens of its request so far.

        The chunk's own keys and values must already lie in their slots (see `write_kv`). What lies
        in slots that no row may see is never read into a result, whatever it is (NaN included).

        Args:
            query: [T, H, Dk], any float dtype.
            k_pages: [num_pages, page_size, Hkv, Dk], of a type in `select.page_types`; H is a
                multiple of Hkv (grouped queries: head h reads key head h // (H // Hkv)).
            v_pages: [num_pages, page_size, Hkv, Dv], of the same type.
            batch: the step's rows.
            scale: factor on the scores, usually Dk ** -0.5.
            window: w lets a query at position p see the keys p - w + 1 .. p (transformers'
                `sliding_window`); None lets it see 0 .. p.
            softcap: c turns scores into c * tanh(scores / c) before masking (Gemma 2).
            sinks: [H] an extra logit per head that takes part in the softmax and has no value
                (gpt-oss).

        Returns:
            [T, H, Dv] in the dtype of `query`.
        """
        ...
