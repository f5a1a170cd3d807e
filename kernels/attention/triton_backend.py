"""Paged attention by the Triton kernels (kernels/triton/device/attention_kernels.py)."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rayfin.kernels.shapes import PagedBatch, to_device
from rayfin.kernels.triton.device import attention_kernels
from rayfin.kernels.triton.device.attention_kernels import attend_tiles
from rayfin.kernels.triton.layers import store_kv
from rayfin.kernels.triton.pdl import launch_options
from rayfin.kernels.triton.tile_map import TileMap, make_tile_map
from rayfin.kernels.triton.trials import BY_PAGE, PER_KEY, TWO_LOOPS, WORDS, trials

PROGRAMS_PER_CORE = 2  # target of each launch; four take a fifth longer for 8 rows on an H200
DECODE_ROWS = 16  # the smallest number that a tensor core multiplies
DECODE_KEYS = 32  # a block of keys; narrow ones leave room for more of them in flight
MERGED_AHEAD = 4
MOST_PAGE_IDS = 4  # that a program reads one by one for a block of keys
PREFILL_TILE = 128  # queries times heads of a tile of another prefill kernel
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CAST, PAIRS, OCTETS, PTX = (
    form.value
    for form in (
        attention_kernels.CAST,
        attention_kernels.PAIRS,
        attention_kernels.WORDS,
        attention_kernels.PTX,
    )
)
LAUNCHES = "triton launches"
"""Key in `PagedBatch.scratch` of a function (attention, batch, sizes) -> launches."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """The tile sizes of a launch."""

    rows: int  # queries times group of a tile, padded to a power of two
    queries: int  # at most, in a tile
    keys: int  # read at once
    programs: int  # target number of items
    warps: int
    stages: int  # loads in flight
    parts_ahead: int  # parts of a split tile that are read at once when it is merged


@dataclass(slots=True, eq=False)
class Launch:
    """One launch over some rows of a step, and the buffers of its partial results."""

    shape: TileShape
    items: torch.Tensor  # [N, 10] int32
    part_out: torch.Tensor  # [parts, Hkv, rows, Dv] fp32
    part_lse: torch.Tensor  # [parts, Hkv, rows] fp32
    arrived: torch.Tensor  # [parts, Hkv] int32, zeros
    pdl: bool = False  # items and page tables are complete before the kernel before it starts


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of the kernel, see `trials`."""

    two_loops: bool = False
    per_key: bool = False  # of decode tiles
    fp8: int = CAST  # of fp8 pages beside queries of 16 bits
    by_page: bool = False  # where blocks hold whole pages, or pages whole blocks

    @classmethod
    def tried(cls, on_gpu: bool) -> "Forms":
        """Those that the environment names."""
        tried = trials()
        words = PTX if on_gpu else OCTETS
        fp8 = words if WORDS in tried else CAST
        return cls(TWO_LOOPS in tried, PER_KEY in tried, fp8, BY_PAGE in tried)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one layer's attention."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class PrefillKernel(Protocol):
    """Attention of prompts by another kernel, in steps that no graph holds."""

    def takes(
        self,
        sizes: Sizes,
        k_pages: torch.Tensor,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> bool:
        """Whether it computes layers of these sizes and settings over such pages."""
        ...

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
        """`PagedAttention` of some rows of ``batch``, whose queries are all of ``query``."""
        ...


class TritonAttention:
    """`PagedAttention` in float32, float16 or bfloat16, accumulated in float32.

    Pages may have another of these dtypes, and fp8 (e4m3) on a GPU that converts it.

    Decode rows and prefill chunks are a launch each. Its tiles are queries with all heads of a
    group; the launch merges the parts of long rows. A step's launches are computed once and shared
    by all layers of the same sizes (`PagedBatch.scratch`).

    Chunks of prompts are left to ``prefill``, if it takes them, in steps without given launches
    that have a tile of queries for each core: it does not split rows, as small steps need.
    """

    def __init__(self, device: torch.device, prefill: PrefillKernel | None = None) -> None:
        self.prefill = prefill
        on_gpu = device.type == "cuda"
        converts = not on_gpu or torch.cuda.get_device_capability(device) >= (8, 9)
        self.page_types = (*DTYPES, torch.float8_e4m3fn) if converts else DTYPES
        self.cores = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        self.forms = Forms.tried(on_gpu)

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
        assert k_pages.is_contiguous() and v_pages.is_contiguous()
        assert k_pages.dtype == v_pages.dtype and k_pages.dtype in self.page_types
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            query = query.contiguous()
        tokens, heads, key_dim = query.shape
        kv_heads, value_dim = v_pages.shape[2:]
        sizes = Sizes(heads, kv_heads, key_dim, value_dim, query.dtype, window)
        out, rows, prefill = query.new_empty(tokens, heads, value_dim), batch.rows, self.prefill
        if prefill and self._leaves_prompts(prefill, batch, sizes, k_pages, softcap, sinks):
            rows = batch.decoding
            first, prompts = int(batch.query_start_cpu[rows]), slice(rows, batch.rows)
            asked, pages = (batch, prompts), (k_pages, v_pages)
            attended = prefill(query[first:], *pages, *asked, scale, window, softcap, sinks)
            if not rows:
                return attended
            out[first:] = attended
        form = self._form_of(k_pages.dtype, sizes)
        if form in (OCTETS, PTX):
            k_pages, v_pages = k_pages.view(torch.int32), v_pages.view(torch.int32)
        for launch in self._launches(batch, sizes, rows):
            shape = launch.shape
            attend_tiles[(kv_heads, len(launch.items))](
                query,
                k_pages,
                v_pages,
                batch.page_tables,
                launch.items,
                query if sinks is None else sinks,
                out,
                launch.part_out,
                launch.part_lse,
                launch.arrived,
                query.stride(0),
                batch.page_tables.stride(0),
                scale,
                softcap or 0.0,
                window or 0,
                KV_HEADS=kv_heads,
                GROUP=sizes.group,
                KEY_DIM=key_dim,
                VALUE_DIM=value_dim,
                KEY_WIDTH=width(key_dim),
                VALUE_WIDTH=width(value_dim),
                PAGE_SIZE=batch.page_size,
                ROWS=shape.rows,
                KEYS=shape.keys,
                WINDOW=window is not None,
                SOFTCAP=softcap is not None,
                SINKS=sinks is not None,
                PARTS_AHEAD=shape.parts_ahead,
                TWO_LOOPS=self.forms.two_loops,
                PER_KEY=self.forms.per_key and shape.queries == 1,
                FORM=form,
                BY_PAGE=self._reads_by_page(shape.keys, batch.page_size, window),
                num_warps=shape.warps,
                num_stages=shape.stages,
                **launch_options(launch.pdl),
            )
        return out

    @staticmethod
    def write_kv(
        key: torch.Tensor,
        value: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """`write_kv.write_kv` in one launch; tokens with a negative slot are not written."""
        store_kv(key, value, k_pages, v_pages, slots)

    def _form_of(self, pages: torch.dtype, sizes: Sizes) -> int:
        fits = sizes.dtype.itemsize == 2 and not (sizes.key_dim % 4 or sizes.value_dim % 4)
        return self.forms.fp8 if pages == torch.float8_e4m3fn and fits else CAST

    def _reads_by_page(self, keys: int, page_size: int, window: int | None) -> bool:
        # Items behind a window begin anywhere, all others with a block.
        even = not max(keys, page_size) % min(keys, page_size)
        few = keys <= MOST_PAGE_IDS * page_size
        return self.forms.by_page and even and few and window is None

    def decode_shape(self, sizes: Sizes) -> TileShape:
        """The tile shape of decode rows."""
        rows = max(DECODE_ROWS, width(sizes.group))
        programs = self.cores * PROGRAMS_PER_CORE // sizes.kv_heads
        ahead = MERGED_AHEAD if rows == DECODE_ROWS else 1  # more rows take too much shared memory
        return TileShape(rows, 1, DECODE_KEYS, max(programs, 1), 4, _decode_stages(sizes), ahead)

    def prefill_shape(self, sizes: Sizes) -> TileShape:
        """The tile shape of prefill chunks."""
        rows = max(128 if _is_narrow(sizes) else 64, width(sizes.group))
        narrow, wide = (
            _is_narrow(sizes),
            sizes.dtype == torch.float32,
        )  # wide: of few keys, no spills
        keys = 64 if narrow else 16 if wide else 32  # as many as registers hold
        programs = self.cores * 2 // sizes.kv_heads
        warps = 8 if rows >= 128 or wide else 4
        queries = rows // sizes.group
        return TileShape(rows, queries, keys, max(programs, 1), warps, _stages(sizes), 1)

    def tile_map(self, shape: TileShape, sizes: Sizes, batch: PagedBatch, rows: slice) -> TileMap:
        """The work items of a launch over some of the step's rows."""
        starts, lengths = np.asarray(batch.query_start_cpu), np.asarray(batch.kv_len_cpu)
        return make_tile_map(
            starts[rows.start : rows.stop + 1],
            lengths[rows],
            first_row=rows.start,
            tile_queries=shape.queries,
            key_block=shape.keys,
            programs=shape.programs,
            window=sizes.window,
        )

    def _leaves_prompts(
        self,
        prefill: PrefillKernel,
        batch: PagedBatch,
        sizes: Sizes,
        k_pages: torch.Tensor,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> bool:
        if LAUNCHES in batch.scratch or batch.decoding == batch.rows:
            return False
        # Asked of small steps too: the model's comparison at load is one.
        if not prefill.takes(sizes, k_pages, softcap, sinks):
            return False
        starts = batch.query_start_cpu
        queries = int(starts[batch.rows]) - int(starts[batch.decoding])
        return queries * sizes.heads >= PREFILL_TILE * self.cores

    def _launches(self, batch: PagedBatch, sizes: Sizes, rows: int) -> list[Launch]:
        """Those of the first ``rows`` of the step."""
        if LAUNCHES in batch.scratch:  # CUDA graphs reuse them in every step
            kept: list[Launch] = batch.scratch[LAUNCHES](self, batch, sizes)
            return kept
        if (sizes, rows) not in batch.scratch:
            parts = [
                (self.decode_shape(sizes), slice(0, batch.decoding)),
                (self.prefill_shape(sizes), slice(batch.decoding, rows)),
            ]
            batch.scratch[sizes, rows] = [
                make_launch(
                    shape, sizes, self.tile_map(shape, sizes, batch, part), batch.kv_len.device
                )
                for shape, part in parts
                if part.start < part.stop
            ]
        launches: list[Launch] = batch.scratch[sizes, rows]
        return launches


def make_launch(shape: TileShape, sizes: Sizes, tile_map: TileMap, device: torch.device) -> Launch:
    """A launch of a tile map, with buffers for its partial results."""
    places = (tile_map.parts, sizes.kv_heads, shape.rows)
    counters = (
        torch.zeros if tile_map.parts else torch.empty
    )  # with no parts, zeros would be a launch for nothing
    return Launch(
        shape,
        to_device(tile_map.items, device),
        torch.empty(*places, sizes.value_dim, dtype=torch.float32, device=device),
        torch.empty(places, dtype=torch.float32, device=device),
        counters(places[:2], dtype=torch.int32, device=device),
    )


def width(size: int) -> int:
    """Rounds up to a power of two that a tensor core can multiply."""
    return max(16, 1 << (size - 1).bit_length())


def _is_narrow(sizes: Sizes) -> bool:
    """Whether large tiles fit into a multiprocessor's registers and shared memory."""
    return max(sizes.key_dim, sizes.value_dim) <= 128 and sizes.dtype != torch.float32


def _decode_stages(sizes: Sizes) -> int:
    return 4 if _is_narrow(sizes) else _stages(sizes)


def _stages(sizes: Sizes) -> int:
    return 3 if max(sizes.key_dim, sizes.value_dim) * sizes.dtype.itemsize <= 512 else 2
