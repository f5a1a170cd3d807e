"""What every paged attention backend takes and gives.

Paged attention (Kwon et al., SOSP 2023, "PagedAttention") keeps the keys and values of a request in
fixed pages that may lie anywhere in one big tensor; a page table per request says where. One call
serves a mixed step: rows that decode one token and rows that prefill a chunk, packed along `T`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
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


# Rules on logits as lists of tokens on the device: the layout that kernels of a GPU read.

USED = 1  # kinds of a token in a list, which may be of several
ALLOWED = 2
BANNED = 4
BANNED_EARLY = 8


@dataclass(frozen=True, slots=True, eq=False)
class TokenRules:
    """What changes the logits of S rows: a list of tokens for each, in E places that all share.

    Sampled tokens that are counted lengthen a list: whoever lays them out leaves room.
    """

    first: torch.Tensor  # [S] int32, where the row's list begins
    length: torch.Tensor  # [S] int32, 0 = the row stays as it is, unless it is restricted
    restricted: torch.Tensor  # [S] int32, 1 = only tokens of kind ALLOWED may be sampled
    counted: torch.Tensor  # [S] int32, 1 = what the row samples is counted
    banned_until: torch.Tensor  # [S] int64, the first position at which BANNED_EARLY tokens may be
    repetition: torch.Tensor  # [S] fp32, 1 is off
    presence: torch.Tensor  # [S] fp32, 0 is off
    frequency: torch.Tensor  # [S] fp32, 0 is off
    token: torch.Tensor  # [E] int32, none twice in a list
    count: torch.Tensor  # [E] int32, how often it was generated
    kind: torch.Tensor  # [E] int32, a sum of the kinds; USED = penalties apply
    bias: torch.Tensor  # [E] fp32

    def rows(self, count: int) -> "TokenRules":
        """Those of the first ``count`` rows."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return TokenRules(
            **{
                name: value if name in PER_ENTRY else value[:count]
                for name, value in values.items()
            }
        )


PER_ENTRY = ("token", "count", "kind", "bias")
"""The fields of `TokenRules` that are of all lists together."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """How to sample each row; one entry per sampled row, on the logits' device."""

    temperature: torch.Tensor  # [S] fp32, 0 = greedy
    top_k: torch.Tensor  # [S] int64, 0 = off
    top_p: torch.Tensor  # [S] fp32, 1 = off
    min_p: torch.Tensor  # [S] fp32, 0 = off
    seed: torch.Tensor  # [S] int64
    position: torch.Tensor  # [S] int64, index in its request of the token being sampled
    all_greedy: bool  # known on the host, as the three below: work that no row asks for is skipped
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
