"""The inputs and outputs that all kernel backends share, and how they get to the device.

Paged attention (Kwon et al., SOSP 2023, "PagedAttention") keeps the keys and values of a request in
fixed pages anywhere in one big tensor; each request has a page table. A page is vLLM's block.
One call serves a mixed step: rows that decode one token and rows that prefill a chunk, packed
along `T`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

HostInts = Sequence[int] | npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class PagedBatch:
    """One step's rows for attention.

    Decode rows come first, then prefill rows; their tokens are packed along T. Each step needs a
    new batch: all layers share it, and `scratch` caches what a backend derives from it.
    """

    query_start: torch.Tensor  # [R + 1] int32, where each row's chunk starts in T (last = T)
    kv_len: torch.Tensor  # [R] int32, tokens visible to the row's last one: cached + this chunk
    page_tables: torch.Tensor  # [R, P] int32, page ids; any valid page id past the row's pages
    slots: torch.Tensor  # [T] int64, page_id * page_size + offset: where each token's K, V go
    positions: torch.Tensor  # [T] int64, index of the token in its request
    query_start_cpu: HostInts  # [R + 1], host copy of query_start: no device sync to read it
    kv_len_cpu: HostInts  # [R], host copy of kv_len
    decoding: int  # the first `decoding` rows are chunks of one token
    page_size: int  # tokens per page
    sees_to: npt.NDArray[np.int32] | None = None  # [T] on the host: the last position that a token
    # of a prompt sees, not below its own and rising in a row; None: its own
    groups: "GroupedTables | None" = None  # where layers are in groups with pages of their own
    scratch: dict[Any, Any] = field(
        default_factory=dict, repr=False
    )  # a backend's cache for the step

    def of_group(self, group: int) -> "PagedBatch":
        """The batch as the layers of a group see it; the first one's is this."""
        if not group or self.groups is None:
            return self
        key = ("group", group)
        if key not in self.scratch:
            tables, slots = self.groups.page_tables[group], self.groups.slots[group]
            self.scratch[key] = replace(
                self, page_tables=tables, slots=slots, groups=None, scratch={}
            )
        batch: PagedBatch = self.scratch[key]
        return batch

    @property
    def rows(self) -> int:
        """The number of rows (R)."""
        return len(self.kv_len_cpu)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedTables:
    """Page tables and slots of G groups of layers; those of a ``PagedBatch`` are the first."""

    page_tables: torch.Tensor  # [G, R, P] int32
    slots: torch.Tensor  # [G, T] int64


class PagedAttention(Protocol):
    """The function that every backend implements."""

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
        """Attention of each row's chunk over its request so far, causal without ``batch.sees_to``.

        The chunk's keys and values must already be in their slots (see `write_kv`). The content of
        slots that a row may not see never affects a result, not even NaN.

        Args:
            query: [T, H, Dk], any float dtype.
            k_pages: [num_pages, page_size, Hkv, Dk], of a type in `select.page_types`; H is a
                multiple of Hkv (grouped queries: head h reads key head h // (H // Hkv)).
            v_pages: [num_pages, page_size, Hkv, Dv], of the same type.
            batch: the step's rows.
            scale: factor on the scores, usually Dk ** -0.5.
            window: w lets a query at position p see the keys p - w + 1 .. p (transformers'
                `sliding_window`); None lets it see 0 .. p. With ``batch.sees_to`` both go on to
                the position there.
            softcap: c turns scores into c * tanh(scores / c) before masking (Gemma 2).
            sinks: [H] an extra logit per head that takes part in the softmax and has no value
                (gpt-oss).

        Returns:
            [T, H, Dv] in the dtype of `query`.
        """
        ...


# Rules on logits, as lists of tokens on the device, in the layout that GPU kernels read.

USED = 1  # kinds of a token in a list, combined as bits
ALLOWED = 2
BANNED = 4
BANNED_EARLY = 8


@dataclass(frozen=True, slots=True, eq=False)
class RuleTensors:
    """Changes to the logits of S rows: a list of tokens for each row, in E entries that all share.

    Counting sampled tokens appends to a list, so lists need spare entries.
    """

    first: torch.Tensor  # [S] int32, start of the row's list
    length: torch.Tensor  # [S] int32, 0 = no change, unless the row is restricted
    restricted: torch.Tensor  # [S] int32, 1 = only tokens of kind ALLOWED may be sampled
    counted: torch.Tensor  # [S] int32, 1 = the row's sampled tokens are counted
    banned_until: torch.Tensor  # [S] int64, first position that allows BANNED_EARLY tokens
    repetition: torch.Tensor  # [S] fp32, 1 is off
    presence: torch.Tensor  # [S] fp32, 0 is off
    frequency: torch.Tensor  # [S] fp32, 0 is off
    token: torch.Tensor  # [E] int32, unique within a list
    count: torch.Tensor  # [E] int32, times it was generated
    kind: torch.Tensor  # [E] int32, a sum of the kinds; USED = penalties apply
    bias: torch.Tensor  # [E] fp32

    def rows(self, count: int) -> "RuleTensors":
        """The rules of the first ``count`` rows."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return RuleTensors(
            **{
                name: value if name in PER_ENTRY else value[:count]
                for name, value in values.items()
            }
        )


PER_ENTRY = ("token", "count", "kind", "bias")
"""The fields of `RuleTensors` with an entry per token instead of per row."""


def within_chunks(batch: PagedBatch, size: int) -> PagedBatch:
    """Cuts the rows of ``batch`` at multiples of ``size`` positions, each from its chunk on.

    So tokens attend within chunks of the context (Llama 4): a query at position p sees the keys
    from ``p // size * size`` on. No kernel needs to know: a chunk counts as a request, whose pages
    are some of the row's. ``size`` is a multiple of the page size. Tokens stay where they are in T.
    """
    key = ("within chunks", size)
    if (known := batch.scratch.get(key)) is None:
        batch.scratch[key] = known = _cut(batch, size)
    cut: PagedBatch = known
    return cut


def _cut(batch: PagedBatch, size: int) -> PagedBatch:
    starts = np.asarray(batch.query_start_cpu, np.int64)
    ends = np.asarray(batch.kv_len_cpu, np.int64)
    begins = ends - np.diff(starts)  # position of each row's first token
    counts = (ends - 1) // size - begins // size + 1
    row = np.repeat(np.arange(len(ends)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    chunk_start = (begins[row] // size + within) * size
    first = np.maximum(begins[row], chunk_start)
    last = np.minimum(ends[row], chunk_start + size)
    query_start = np.append(0, np.cumsum(last - first)).astype(np.int32)
    kv_len = (last - chunk_start).astype(np.int32)
    width = batch.page_tables.shape[1]
    pages = chunk_start[:, None] // batch.page_size + np.arange(min(size // batch.page_size, width))
    device = batch.page_tables.device
    columns = torch.from_numpy(np.minimum(pages, width - 1)).to(device)
    token_start = torch.from_numpy(np.repeat(chunk_start, last - first)).to(device)
    return PagedBatch(
        query_start=torch.from_numpy(query_start).to(device),
        kv_len=torch.from_numpy(kv_len).to(device),
        page_tables=batch.page_tables[torch.from_numpy(row).to(device)].gather(1, columns),
        slots=batch.slots,
        positions=batch.positions - token_start,
        query_start_cpu=query_start,
        kv_len_cpu=kv_len,
        decoding=batch.decoding,
        page_size=batch.page_size,
    )


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """The sampling settings; one entry per sampled row, on the logits' device."""

    temperature: torch.Tensor  # [S] fp32, 0 = greedy
    top_k: torch.Tensor  # [S] int64, 0 = off
    top_p: torch.Tensor  # [S] fp32, 1 = off
    min_p: torch.Tensor  # [S] fp32, 0 = off
    seed: torch.Tensor  # [S] int64
    position: torch.Tensor  # [S] int64, index in its request of the token being sampled
    all_greedy: bool  # on the host, like the next three, to skip filters that no row uses
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


@dataclass(frozen=True, slots=True, eq=False)
class TokenBits:
    """The only tokens that N of the S rows may sample; the other rows may sample all.

    Token ``t`` is allowed if bit ``t % 32`` of word ``t // 32`` is set.
    """

    rows: torch.Tensor  # [N] int64, rising
    words: torch.Tensor  # [N, W] int32, W >= ceil(V / 32)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a mixture chooses a row's experts by the logits of its router."""

    choices: int  # K
    sigmoid: bool = False  # scores are sigmoids; else a softmax
    normed: bool = False  # shares of the chosen sum to ``scale``
    scale: float = 1.0
    groups: int = 1
    kept: int = 1  # groups whose experts may be chosen
    pairs: bool = False  # a group is as good as its two best experts; else as its best one


def staged(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a host tensor to copy to ``device``, pinned if that is a GPU.

    Only copies from pinned memory are asynchronous. torch's allocator does not reuse pinned memory
    before copies from it are done, so the tensor may be dropped at once. For a CPU the tensor
    shares the array's memory.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on ``device``; on a GPU the copy is queued on the current stream."""
    if device.type == "cpu":
        return torch.from_numpy(np.ascontiguousarray(array))
    return staged(array, device).to(device, non_blocking=True)


ALIGNMENT = 16
"""Bytes: kernels are compiled for tensors whose addresses are multiples of it."""


def all_to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on ``device``, as `to_device` brings each; on a GPU in one copy for all.

    To pin memory and to queue a copy takes some 20 us, however few the bytes are. The tensors are
    parts of one buffer, which lives as long as one of them.
    """
    if device.type == "cpu":
        return [to_device(array, device) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    starts = [0, *ends[:-1]]
    packed = np.zeros(ends[-1], np.uint8)
    for array, start in zip(arrays, starts, strict=True):
        octets = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        packed[start : start + array.nbytes] = octets
    whole, tensors = to_device(packed, device), []
    for array, start in zip(arrays, starts, strict=True):
        dtype = torch.from_numpy(array[:0]).dtype
        tensors.append(whole[start : start + array.nbytes].view(dtype).view(array.shape))
    return tensors
