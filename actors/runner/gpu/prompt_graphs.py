"""The layers of steps with prompts, or with drafts, as CUDA graphs by their number of tokens.

A decode step is one graph from its inputs to its tokens (`graphs`). In other steps rows have any
number of tokens, and which of these are sampled differs. So their graphs hold the layers alone,
from the embeddings to the residual stream. The head and the sampling are launched behind them, or
are a graph by the number of rows (`prompt_steps`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch

from rayfin.actors.messages import SAMPLED_LAST_STEP, BoolArray, Int32Array, SchedulerInfo
from rayfin.actors.runner.batch import StepInputs, token_places
from rayfin.actors.runner.gpu.decode_state import bucket_of
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.kernels.attention.triton_backend import (
    LAUNCHES,
    Launch,
    Sizes,
    TileShape,
    TritonAttention,
    make_launch,
)
from rayfin.kernels.shapes import PagedAttention, PagedBatch, staged, to_device
from rayfin.kernels.triton.device.decode_kernels import enter_tokens
from rayfin.kernels.triton.products import NARROW
from rayfin.kernels.triton.tile_map import ITEM_FIELDS, TileMap

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of the graphs. From 64 on gaps are narrower: the device computes what is padded."""

MOST_TOKENS, MOST_WIDE_TOKENS = 3072, 768
"""Tokens of the largest graph, of models up to `NARROW` and of wider ones.

With more the device computes for longer than the host takes to launch. That is some 15 ms for 28
layers, in which an H200 computes 4096 tokens of the 0.6B shape, and gains nothing by a graph
(``benchmarks/gpu.py --sections prompts``).
"""

SPARE_TILES, SPARE_SHARE = 8, 16
"""Places for tiles of prompts beside those of one prompt and of split ones: at least so many, and
one for each ``SPARE_SHARE`` tokens. With more prompts these are split less. Each place is a program
in every layer, though it may have nothing to do; more of them do not show in a larger step."""

ENTERED = 256
"""Tokens that a program loads."""

ALIGNED_PLACES = 8
"""Items are of 40 bytes. Kernels are compiled for addresses that are multiples of 16."""

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Records work on the device, and gives what replays it."""


def token_buckets(max_tokens: int, hidden: int) -> list[int]:
    """Numbers of tokens that get a graph, ascending, where a step has at most ``max_tokens``."""
    largest = min(max_tokens, MOST_TOKENS if hidden <= NARROW else MOST_WIDE_TOKENS)
    return [*(size for size in BUCKETS if size < largest), largest]


class Recordable(StepModel, Protocol):
    """A ``StepModel`` whose layers and head can be recorded: `GpuDecoder`, `GraphModel`."""

    replay: Callable[[StepInputs], torch.Tensor | None] | None

    @property
    def attention(self) -> PagedAttention: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def states(self) -> StateTensors | None:
        """Those of layers that keep some; then decode steps alone are recorded."""

    def attention_sizes(self) -> list[Sizes]:
        """Returns the sizes of its layers' attention, each once."""

    def starts_early(self, rows: int) -> bool:
        """Returns whether kernels of so many rows start before those before them end."""

    def stream(self, input_ids: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """Returns what its layers give for T tokens [T, hidden]; the cache gets all of them."""

    def logits(self, stream: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Returns the logits [S, V] of the rows ``sampled`` [S] of ``stream``."""


@dataclass(frozen=True, slots=True)
class _LaunchPair:
    """The attention launches of layers of the same sizes, for the largest bucket."""

    sizes: Sizes
    items: torch.Tensor  # [N, 10] int32: of decodes, then of prompts
    launches: tuple[Launch, Launch]  # of decodes and of prompts; items are in ``items``


class StepLaunches:
    """Attention launches at fixed addresses, whose tile maps each step fills in.

    A graph has a launch for decodes and one for prompts, of as many programs as its tokens may
    need. Those without an item end at once.
    """

    def __init__(
        self,
        attention: TritonAttention,
        sizes: list[Sizes],
        max_tokens: int,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self._attention = attention
        self._max_rows = max_rows
        self._pairs = {each: self._make(each, max_tokens, device) for each in sizes}

    def of(
        self,
        tokens: int,
        pdl: bool,
        attention: TritonAttention,
        batch: PagedBatch,
        sizes: Sizes,
    ) -> list[Launch]:
        """The launches of the graph of so many ``tokens``; see `PagedBatch.scratch`.

        With ``pdl`` that of decodes starts early: items and page tables are complete before the
        graph starts. That of prompts, of large tiles, does not.
        """
        pair = self._pairs[sizes]
        decodes, prompts = pair.launches
        first, count = self._places(decodes.shape, tokens), self._places(prompts.shape, tokens)
        return [
            replace(decodes, items=pair.items[:first], pdl=pdl),
            replace(prompts, items=pair.items[first : first + count]),
        ]

    def fill(self, tokens: int, batch: PagedBatch) -> bool:
        """Writes a step's tile maps into the launches of the graph of so many ``tokens``.

        Returns:
            Whether they have room for it.
        """
        if not self.fits(tokens, batch):
            return False
        for pair in self._pairs.values():
            items = np.concatenate(
                [
                    self._map(launch, pair.sizes, tokens, batch, rows)
                    for launch, rows in zip(pair.launches, _parts(batch), strict=True)
                ]
            )
            copy = staged(items, pair.items.device)
            pair.items[: len(items)].copy_(copy, non_blocking=True)
        return True

    def fits(self, tokens: int, batch: PagedBatch) -> bool:
        """Whether the launches of the graph of so many ``tokens`` have room for a step."""
        return all(
            _tiles(launch.shape, batch, rows) < self._places(launch.shape, tokens)
            for pair in self._pairs.values()
            for launch, rows in zip(pair.launches, _parts(batch), strict=True)
        )

    def _map(
        self, launch: Launch, sizes: Sizes, tokens: int, batch: PagedBatch, rows: slice
    ) -> Int32Array:
        """All items [places, 10] of a launch over some rows."""
        shape = launch.shape
        places = self._places(shape, tokens)
        items = np.zeros((places, len(ITEM_FIELDS)), np.int32)  # without queries
        if tiles := _tiles(shape, batch, rows):
            programs = min(shape.programs, places - tiles)
            split = replace(shape, programs=programs)
            tile_map = self._attention.tile_map(split, sizes, batch, rows)
            assert tile_map.parts <= len(launch.arrived)
            items[: len(tile_map.items)] = tile_map.items
        return items

    def _places(self, shape: TileShape, tokens: int) -> int:
        """Programs per head of a launch of the graph of so many ``tokens``."""
        rows = min(tokens, self._max_rows)
        spare = max(SPARE_TILES, min(rows, tokens // SPARE_SHARE))
        tiles = rows if shape.queries == 1 else tokens // shape.queries + spare
        return -(-(tiles + shape.programs) // ALIGNED_PLACES) * ALIGNED_PLACES

    def _make(self, sizes: Sizes, max_tokens: int, device: torch.device) -> _LaunchPair:
        attention = self._attention
        shapes = attention.decode_shape(sizes), attention.prefill_shape(sizes)
        total = sum(self._places(shape, max_tokens) for shape in shapes)
        # A part is at least as long as all keys over the programs, and a tile of several parts has
        # less than twice as many as its keys need. So there are less than twice as many parts as
        # programs.
        empty = np.zeros((0, len(ITEM_FIELDS)), np.int32)
        decodes, prompts = (
            make_launch(shape, sizes, TileMap(empty, 2 * shape.programs), device)
            for shape in shapes
        )
        items = torch.zeros(total, len(ITEM_FIELDS), dtype=torch.int32, device=device)
        return _LaunchPair(sizes, items, (decodes, prompts))


def _parts(batch: PagedBatch) -> tuple[slice, slice]:
    """Returns the rows of a launch of decodes, and of one of prompts."""
    return slice(0, batch.decoding), slice(batch.decoding, batch.rows)


def _tiles(shape: TileShape, batch: PagedBatch, rows: slice) -> int:
    """Counts the tiles of some rows of a step."""
    chunks = np.diff(np.asarray(batch.query_start_cpu)[rows.start : rows.stop + 1])
    return int((-(-chunks // shape.queries)).sum())


class PromptGraphs:
    """Replays the decoder's layers for steps of any rows; on a CPU without capture.

    A step is padded to the next bucket. Padding has no slot, so that its keys are written nowhere,
    and no item of attention. What its rows compute reaches no other row.

    Inputs are at fixed addresses. The copies to them come from tensors of the step, or from pinned
    memory that is not used again before they are done. They are queued on the stream that replays
    and that computes the logits: so they wait for the replay before, and the residual stream
    [B, hidden] of a graph is read before a later replay, of this or another graph of the same
    memory pool, writes over it.
    """

    def __init__(
        self,
        model: Recordable,
        record: Record,
        *,
        max_tokens: int,
        max_rows: int,
        pages_per_request: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.model = model
        self.page_size = page_size
        attention, sizes = model.attention, model.attention_sizes()
        assert isinstance(attention, TritonAttention)
        self.sizes = token_buckets(max_tokens, model.hidden_size)
        largest = self.sizes[-1]
        self._input_ids, self._positions = zeros(torch.int64, largest), zeros(torch.int64, largest)
        self._slots = zeros(torch.int64, largest).fill_(-1)  # to record writes no keys
        self.tables = zeros(torch.int32, max_rows, pages_per_request)
        self._launches = StepLaunches(attention, sizes, largest, max_rows, device)
        self._streams: dict[int, torch.Tensor] = {}  # [B, hidden] by bucket, what it gives
        self._replays: dict[int, Callable[[], None]] = {}
        for size in reversed(self.sizes):  # the largest first, whose memory the others reuse
            self._replays[size] = record(self._step(size))

    @property
    def dtype(self) -> torch.dtype:
        """That of what the layers give."""
        return next((each.dtype for each in self._streams.values()), self.model.dtype)

    def serve(self) -> None:
        """The model replays its steps from now on, until it gets other pages."""
        self.model.replay = self.replay

    def replay(self, inputs: StepInputs) -> torch.Tensor | None:
        """The residual stream [T or more, hidden] of a step, or None if no graph holds it.

        It is valid until the next replay of any graph.
        """
        batch, tokens = inputs.batch, len(inputs.input_ids)
        bucket = bucket_of(tokens, self.sizes)
        rows, width = batch.page_tables.shape
        fits = rows <= self.tables.shape[0] and width <= self.tables.shape[1]
        ahead = batch.sees_to is not None
        other_inputs = inputs.given is not None or inputs.rope_positions is not None
        if bucket is None or not fits or ahead or other_inputs:
            return None
        if not self._launches.fill(bucket, batch):
            return None
        self._input_ids[:tokens].copy_(inputs.input_ids)
        self._positions[:tokens].copy_(batch.positions)
        self._slots[:tokens].copy_(batch.slots)
        self._slots[tokens:bucket].fill_(-1)
        self.tables[:rows, :width].copy_(batch.page_tables)
        return self._run(bucket)

    def holds(self, info: SchedulerInfo) -> bool:
        """Returns whether a graph holds the layers of a step; none does beside drafts."""
        bucket = bucket_of(len(info.merge_prompt), self.sizes)
        if bucket is None or info.num_guessed or len(info.ids) > len(self.tables):
            return False
        return self._launches.fits(bucket, self._rows_of(info, bucket))

    def run(
        self,
        info: SchedulerInfo,
        slots: RequestSlots,
        unread: BoolArray,
        last_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Replays a step that it ``holds``, and whose page tables are in ``tables``.

        Args:
            unread: by slot, whether its last token is in ``last_tokens`` [slots] alone.
        """
        tokens = len(info.merge_prompt)
        bucket = bucket_of(tokens, self.sizes)
        assert bucket is not None
        slot, positions, page, within = token_places(info, self.page_size)
        known = np.where(unread[slot], -1 - slot, slots.last_token[slot])
        entered = np.zeros((3, bucket), np.int64)
        entered[2, tokens:] = -1
        entered[:, :tokens] = (
            np.where(info.merge_prompt == SAMPLED_LAST_STEP, known, info.merge_prompt),
            positions,
            slots.page_tables[slot, page] * np.int64(self.page_size) + within,
        )
        self._launches.fill(bucket, self._rows_of(info, bucket))
        enter_tokens[(-(-bucket // ENTERED),)](
            to_device(entered, last_tokens.device),
            last_tokens,
            *(self._input_ids, self._positions, self._slots),
            bucket,
            BLOCK=ENTERED,
        )
        return self._run(bucket)

    def _run(self, bucket: int) -> torch.Tensor:
        self._replays[bucket]()
        return self._streams[bucket]

    def _rows_of(self, info: SchedulerInfo, bucket: int) -> PagedBatch:
        """The batch of a bucket as far as tile maps read it, with the rows of a step."""
        return replace(
            self._batch(bucket),
            query_start_cpu=np.append(info.chunk_idx, len(info.merge_prompt)),
            kv_len_cpu=info.kv_len + info.chunk_len,
            decoding=info.decoding_batch,
        )

    def _step(self, bucket: int) -> Callable[[], None]:
        input_ids, batch = self._input_ids[:bucket], self._batch(bucket)

        @torch.inference_mode()
        def step() -> None:
            self._streams[bucket] = self.model.stream(input_ids, batch)

        return step

    def _batch(self, bucket: int) -> PagedBatch:
        """The batch for attention, whose rows and lengths are in the launches' items."""
        rows = len(self.tables)
        return PagedBatch(
            query_start=self.tables[:0, 0],
            kv_len=self.tables[:, 0],
            page_tables=self.tables,
            slots=self._slots[:bucket],
            positions=self._positions[:bucket],
            query_start_cpu=range(rows + 1),
            kv_len_cpu=range(1, rows + 1),
            decoding=0,
            page_size=self.page_size,
            scratch={LAUNCHES: partial(self._launches.of, bucket, self.model.starts_early(bucket))},
        )
