"""Paged attention by the compiled CPU kernels (kernels/cpu/paged_attention)."""

import ctypes

import numpy as np
import torch

from rayfin.kernels.cpu.kernels import STORAGES, CpuKernels
from rayfin.kernels.shapes import HostInts, PagedBatch

_POINTERS = (
    *("query", "k_pages", "v_pages", "page_tables", "query_start", "kv_len"),
    *("sees_to", "sinks", "out"),
)
_SIZES = ("query_stride", "table_stride", "rows", "decoding", "page_size")
_SHAPE = ("heads", "kv_heads", "key_dim", "value_dim", "window", "storage")


class AttentionArguments(ctypes.Structure):
    """The struct Attention of paged_attention/attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in (*_SIZES, *_SHAPE)),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class CpuAttention:
    """`PagedAttention` over float32 or bfloat16 pages, in float32 arithmetic.

    Decode rows are split along their keys, so that one long row uses all threads. Prefill chunks
    are split into blocks of queries and heads, with an online softmax (FlashAttention).
    """

    page_types = (torch.float32, torch.bfloat16)

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

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
        """Implements `PagedAttention`."""
        dtype = query.dtype
        query = query.float().contiguous()
        sinks = None if sinks is None else sinks.float().contiguous()
        tables = batch.page_tables
        assert tables.dtype == torch.int32 and tables.stride(1) == 1
        assert k_pages.is_contiguous() and v_pages.is_contiguous()
        assert k_pages.dtype == v_pages.dtype
        tokens, heads, key_dim = query.shape
        out = torch.empty(tokens, heads, v_pages.shape[3])
        starts, lengths = step_lengths(batch)
        arguments = AttentionArguments(
            query.data_ptr(),
            k_pages.data_ptr(),
            v_pages.data_ptr(),
            tables.data_ptr(),
            starts.ctypes.data,
            lengths.ctypes.data,
            sees_to(batch),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            heads * key_dim,
            tables.stride(0),
            batch.rows,
            batch.decoding,
            batch.page_size,
            heads,
            k_pages.shape[2],
            key_dim,
            v_pages.shape[3],
            window or 0,
            STORAGES[k_pages.dtype],
            scale,
            softcap or 0.0,
        )
        kernels = self._kernels
        kernels.library.rayfin_attention(kernels.pool, ctypes.byref(arguments))
        return out.to(dtype)


def step_lengths(batch: PagedBatch) -> tuple[np.ndarray, np.ndarray]:
    """query_start [R + 1] and kv_len [R] as dense int32, cached per step."""
    key = ("cpu", "lengths")
    if key not in batch.scratch:
        batch.scratch[key] = (_int32(batch.query_start_cpu), _int32(batch.kv_len_cpu))
    lengths: tuple[np.ndarray, np.ndarray] = batch.scratch[key]
    return lengths


def sees_to(batch: PagedBatch) -> int | None:
    """The address of ``batch.sees_to``, if there is any."""
    values = batch.sees_to
    if values is None:
        return None
    assert values.dtype == np.int32 and values.flags.c_contiguous
    address: int = values.ctypes.data
    return address


def _int32(values: HostInts) -> np.ndarray:
    return np.ascontiguousarray(values, np.int32)
