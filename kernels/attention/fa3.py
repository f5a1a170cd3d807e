"""FlashAttention 3 for chunks of prompts on Hopper, where a user has installed it.

Source: Shah et al., 2024, "FlashAttention-3", by the interface of Dao-AILab's package. It reads
pages of our layout through page tables. Rayfin neither brings nor needs it.
"""

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch

from rayfin.kernels.attention.torch_backend import paged_attention as attend_by_torch
from rayfin.kernels.attention.triton_backend import Sizes
from rayfin.kernels.shapes import PagedBatch

logger = logging.getLogger(__name__)

MODULES = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")
"""Where packages keep ``flash_attn_with_kvcache``."""

HOPPER = (9, 0)

LARGEST_PAGE = 64
"""Tokens. Of pages that hold a whole block of its keys (80 and more) it reads slots past a row's
last token, whose numbers may not be finite."""

TRIAL_ROWS = ((0, 150), (75, 130), (200, 1), (3, 40))
"""Cached tokens and tokens of a chunk, of the rows that it is compared on."""

TRIAL_WINDOW, TRIAL_SCALE = 37, 0.125
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2}


class FlashAttention3:
    """`PrefillKernel` by ``attend``, a ``flash_attn_with_kvcache``.

    It takes layers for which it has given the same numbers as torch, on rows drawn for it, when
    such a layer asked first: that is at load, when the model is compared. Keys of a row are never
    split, so that the same row gives the same bits.
    """

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self._attend = attend
        self._verdicts: dict[Hashable, str] = {}  # why a layer is not taken; empty if it is

    @property
    def refused(self) -> str:
        """Why no layer that has asked is taken; empty if one is, or none has asked."""
        return "" if "" in self._verdicts.values() else "; ".join(set(self._verdicts.values()))

    def takes(
        self,
        sizes: Sizes,
        k_pages: torch.Tensor,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> bool:
        """Implements `PrefillKernel`."""
        tried = replace(sizes, window=None if sizes.window is None else TRIAL_WINDOW)
        key = tried, k_pages.dtype, k_pages.shape[1], softcap, sinks is None
        if key not in self._verdicts:
            self._verdicts[key] = why = self._refuse(tried, k_pages, softcap, sinks)
            layers = f"{sizes.heads} heads of {sizes.key_dim}"
            if why:
                logger.info("FlashAttention 3 does not take prompts of %s: %s", layers, why)
            else:
                logger.info("FlashAttention 3 takes long prompts of %s", layers)
        return not self._verdicts[key]

    def __call__(
        self,
        query: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        batch: PagedBatch,
        rows: slice,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Implements `PrefillKernel`."""
        key = "fa3", rows.start, rows.stop, window
        if key not in batch.scratch:
            batch.scratch[key] = _arguments(batch, rows, window)
        given = {} if sinks is None else {"sinks": sinks}  # older packages have no such argument
        return self._attend(
            query,
            k_pages,
            v_pages,
            **batch.scratch[key],
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            softcap=softcap or 0.0,
            num_splits=1,
            **given,
        )

    def _refuse(
        self, sizes: Sizes, k_pages: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None
    ) -> str:
        """Why such layers are not taken."""
        if sizes.dtype not in TOLERANCE:
            return f"it computes in 16 bits, not in {sizes.dtype}"
        if k_pages.dtype != sizes.dtype:
            return f"pages are {k_pages.dtype} beside {sizes.dtype}"
        if (page_size := k_pages.shape[1]) > LARGEST_PAGE:
            return f"pages of {page_size} tokens, of more than {LARGEST_PAGE}"
        query, keys, values, batch = _trial(sizes, page_size, k_pages.device)
        rows, window = slice(0, batch.rows), sizes.window
        try:
            out = self(query, keys, values, batch, rows, TRIAL_SCALE, window, softcap, sinks)
        except Exception as error:  # whatever a build of it raises of what it was built without
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
        settings: dict[str, Any] = {"window": window, "softcap": softcap, "sinks": sinks}
        expected = attend_by_torch(query, keys, values, batch, scale=TRIAL_SCALE, **settings)
        apart = float((out - expected).abs().max() / expected.abs().max())
        # Written so that NaN is refused.
        return "" if apart <= TOLERANCE[sizes.dtype] else f"{apart:.1e} apart from torch"


def load_fa3(device: torch.device) -> FlashAttention3 | None:
    """The installed FlashAttention 3; None if there is none, or the GPU is not one of Hopper's.

    Raises:
        ValueError: it cannot be loaded.
    """
    if torch.cuda.get_device_capability(device) != HOPPER:
        return None
    for name in MODULES:
        try:
            return FlashAttention3(import_module(name).flash_attn_with_kvcache)
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            if isinstance(error, ModuleNotFoundError) and name.startswith(error.name or " "):
                continue
            raise ValueError(f"attention backend 'fa3': {name} cannot be used: {error}") from error
    return None


def _arguments(batch: PagedBatch, rows: slice, window: int | None) -> dict[str, Any]:
    """Where the queries and keys of some rows are, in FlashAttention's words."""
    ends = batch.query_start[rows.start : rows.stop + 1]
    starts, lengths, tables = ends - ends[:1], batch.kv_len[rows], batch.page_tables[rows]
    if window is not None:
        # It loads whole blocks of keys. In place of pages behind the window, which may be others'
        # by now, it gets the first one that the row sees.
        seen = (lengths - starts.diff() - window + 1).clamp(min=0) // batch.page_size
        columns = torch.arange(tables.shape[1], device=tables.device)
        tables = tables.gather(1, torch.maximum(columns, seen.long().unsqueeze(1)))
    chunks = np.diff(np.asarray(batch.query_start_cpu)[rows.start : rows.stop + 1])
    return {
        "page_table": tables,
        "cache_seqlens": lengths,
        "cu_seqlens_q": starts,
        "max_seqlen_q": int(chunks.max()),
    }


def _trial(
    sizes: Sizes, page_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """A query, pages of keys and of values, and rows whose pages lie anywhere."""
    draws = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draws, device=device).to(sizes.dtype)

    cached, chunks = np.array(TRIAL_ROWS).T
    lengths, starts = cached + chunks, np.append(0, chunks.cumsum())
    width = -(-int(lengths.max()) // page_size)
    pages = torch.randperm(width * len(lengths), generator=draws, device=device)
    at = torch.empty(0, dtype=torch.int64, device=device)  # where keys are written: they are there
    batch = PagedBatch(
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_len=torch.tensor(lengths, dtype=torch.int32, device=device),
        page_tables=pages.to(torch.int32).view(len(lengths), width),
        slots=at,
        positions=at,
        query_start_cpu=starts,
        kv_len_cpu=lengths,
        decoding=0,
        page_size=page_size,
    )
    stored = len(pages), page_size, sizes.kv_heads
    query = drawn(int(starts[-1]), sizes.heads, sizes.key_dim)
    return query, drawn(*stored, sizes.key_dim), drawn(*stored, sizes.value_dim), batch
