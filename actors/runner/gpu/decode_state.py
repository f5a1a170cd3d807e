"""The inputs of multi-step decoding, at fixed addresses on the device; each step advances them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rayfin.actors.messages import BoolArray, Int32Array, Int64Array, SchedulerInfo
from rayfin.actors.runner.batch import STATES, RowInput
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
from rayfin.kernels.shapes import PagedBatch, SamplingRows, all_to_device, staged
from rayfin.kernels.triton.device.decode_kernels import (
    enter_rows,
    finish_rows,
    map_rows,
    place_items,
    prepare_rows,
)
from rayfin.kernels.triton.pdl import launch_options
from rayfin.kernels.triton.tile_map import ITEM_FIELDS, MIN_PART, TileMap

ON_DEVICE = -1
"""In the rows' input tokens: the slot's last token, which the host has not read yet."""

MAX_GRAPH_ROWS = 512
"""Rows of the largest graph. Larger steps are long enough to launch kernel by kernel."""


def bucket_sizes(max_rows: int) -> list[int]:
    """Batch sizes that get a graph, ascending, with smaller gaps between small sizes."""
    max_rows = min(max_rows, MAX_GRAPH_ROWS)
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, MAX_GRAPH_ROWS, 32)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def bucket_of(rows: int, sizes: list[int]) -> int | None:
    """The smallest bucket that holds the rows, or None if there is none."""
    return next((size for size in sizes if size >= rows), None)


def max_steps_per_row(info: SchedulerInfo, slots: RequestSlots, page_size: int) -> Int32Array:
    """[R] steps of the call that each row may take, up to its cap and within its pages.

    `StopTable`'s rule without the stop tokens, which only the device has seen.
    """
    to_cap = slots.stops.num_left(info.ids, info.kv_len + 1)  # known: the cached and the input
    room = slots.num_pages[info.ids].astype(np.int64) * page_size - info.kv_len
    steps: Int64Array = np.minimum(np.minimum(np.maximum(to_cap, 1), room), info.num_steps)
    return steps.astype(np.int32)


@dataclass(slots=True)
class _GraphLaunch:
    """The attention launch of layers of the same sizes, for the largest bucket."""

    shape: TileShape
    launch: Launch


class GraphLaunches:
    """Attention launches at fixed addresses, whose tile map each multi-step call fills in."""

    def __init__(self, max_rows: int, starts_early: Callable[[int], bool]) -> None:
        self._max_rows = max_rows
        self._starts_early = starts_early
        self._graph_launches: dict[Sizes, _GraphLaunch] = {}

    def __call__(self, attention: TritonAttention, batch: PagedBatch, sizes: Sizes) -> list[Launch]:
        """Returns the launch for the rows of ``batch``; called through `PagedBatch.scratch`."""
        if sizes not in self._graph_launches:
            shape = attention.decode_shape(sizes)
            places = self._max_rows + shape.programs
            empty = TileMap(np.zeros((places, len(ITEM_FIELDS)), np.int32), places)
            launch = make_launch(shape, sizes, empty, batch.kv_len.device)
            self._graph_launches[sizes] = _GraphLaunch(shape, launch)
        return [self._for_rows(self._graph_launches[sizes], batch.rows)]

    def fill(self, rows: int, new_rows: torch.Tensor) -> None:
        """Writes the tile maps of a multi-step call into the launches for ``rows`` rows.

        Args:
            new_rows: [4, B] on the device, as `enter_rows` reads it.
        """
        for sizes, graph_launch in self._graph_launches.items():
            items = self._for_rows(graph_launch, rows).items
            map_rows[(len(items),)](
                new_rows,
                items,
                new_rows.shape[1],
                ROWS=max(16, 1 << (self._max_rows - 1).bit_length()),
                PROGRAMS=graph_launch.shape.programs,
                KEY_BLOCK=graph_launch.shape.keys,
                MIN_PART=MIN_PART,
                WINDOW=sizes.window or 0,
            )

    def place(self, rows: int, positions: torch.Tensor) -> None:
        """Writes the rows' positions into the work items."""
        for graph_launch in self._graph_launches.values():
            items = self._for_rows(graph_launch, rows).items
            place_items[(len(items),)](items, positions)

    def _for_rows(self, graph_launch: _GraphLaunch, rows: int) -> Launch:
        whole = graph_launch.launch
        return Launch(
            graph_launch.shape,
            whole.items[: rows + graph_launch.shape.programs],
            whole.part_out,
            whole.part_lse,
            whole.arrived,
            self._starts_early(rows),
        )


class DecodeState:
    """Inputs and outputs of a decode step for up to ``max_rows`` rows, at fixed addresses."""

    def __init__(
        self,
        slots: RequestSlots,
        max_rows: int,
        pages_per_request: int,
        page_size: int,
        device: torch.device,
        starts_early: Callable[[int], bool] = lambda rows: False,
        row_inputs: Sequence[RowInput] = (),
        states: StateTensors | None = None,
    ) -> None:
        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape or (max_rows,), dtype=dtype, device=device)

        self._page_size = page_size
        self._slots = slots
        self._on_device = DeviceSlots(slots, pages_per_request, device)
        self.launches = GraphLaunches(max_rows, starts_early)
        self._starts_early = starts_early
        self._new_rows = zeros(torch.int64, 4, max_rows)  # input of enter_rows
        self.tokens, self.positions = zeros(torch.int64), zeros(torch.int64)
        self._integers = zeros(torch.int64, 2, max_rows)
        self._numbers = zeros(torch.float32, 3, max_rows)
        self.top_k, self.seed = self._integers
        self.temperature, self.top_p, self.min_p = self._numbers
        self.remaining = zeros(torch.int32)
        self.tables = zeros(torch.int32, max_rows, pages_per_request)
        self.slots = zeros(torch.int64)
        self.sampled, self.drawn = zeros(torch.int64), zeros(torch.int64)
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._states = states
        self._state_rows = zeros(torch.int64, 2, max_rows)  # to read and to write
        self._row_inputs = row_inputs
        self._numbers_of_rows = {
            each.name: zeros(torch.int64).fill_(each.neutral) for each in row_inputs
        }

    @property
    def last_tokens(self) -> torch.Tensor:
        """[slots] int64: what graphs have sampled last."""
        return self._on_device.last_tokens

    def use(self, slots: RequestSlots) -> None:
        """Loads rows of ``slots`` from now on, which are new and of the same sizes."""
        self._slots = slots
        self._on_device.use(slots)

    def empty(self, bucket: int) -> None:
        """Makes all rows padding: a step then reads and writes nothing of them."""
        self._new_rows[0].fill_(-1)
        self.remaining.zero_()
        if self._states is not None:
            self._state_rows.fill_(self._states.padding)
        for each in self._row_inputs:
            self._numbers_of_rows[each.name].fill_(each.neutral)
        self.launches.fill(bucket, self._new_rows)

    def load(self, info: SchedulerInfo, steps: Int32Array, bucket: int, unread: BoolArray) -> None:
        """Loads the rows of a multi-step call; the bucket's other rows are padding.

        Args:
            unread: [R] whose last token only the device has.
        """
        ids, first = info.ids, info.merge_prompt[info.chunk_idx]
        known = np.where(unread, ON_DEVICE, self._slots.last_token[ids])
        tokens = np.where(first < 0, known, first)
        self._enter(info, (tokens, info.kv_len, steps), bucket, self.tables)
        if self._states is not None:
            lengths = (each.astype(np.int64) for each in (ids, info.kv_len, steps))
            places = self._states.advance(*lengths)
            state_rows = np.full(self._state_rows.shape, self._states.padding, np.int64)
            state_rows[:, : len(ids)] = places.read, places.write
            device = self._state_rows.device
            self._state_rows.copy_(staged(state_rows, device), non_blocking=True)
        self.launches.fill(bucket, self._new_rows)

    def load_ends(self, info: SchedulerInfo, bucket: int, tables: torch.Tensor) -> None:
        """Loads the rows of a step whose layers run apart, as they are at their last tokens.

        Then ``tokens`` are the places of these in T, and rows that sample have a step remaining.

        Args:
            tables: [bucket or more, P] int32, which gets the rows' pages.
        """
        last = info.chunk_len - 1
        ends = (info.chunk_idx + last, info.kv_len + last, info.last_pos >= 0)
        self._enter(info, ends, bucket, tables)

    def _enter(
        self,
        info: SchedulerInfo,
        rows: tuple[Int64Array | Int32Array, Int32Array, Int32Array | BoolArray],
        bucket: int,
        tables: torch.Tensor,
    ) -> None:
        """Loads rows from their slots: input tokens, positions and steps are given, [R] each."""
        ids = info.ids
        new_rows = np.zeros(self._new_rows.shape, np.int64)
        new_rows[0, len(ids) :] = -1
        new_rows[:, : len(ids)] = (ids, *rows)
        self._new_rows.copy_(staged(new_rows, self._new_rows.device), non_blocking=True)
        self._on_device.update(ids)
        enter_rows[(bucket,)](
            self._new_rows,
            self._on_device.last_tokens,
            self._on_device.tables,
            self._on_device.integers,
            self._on_device.numbers,
            self.tokens,
            self.positions,
            self.remaining,
            self._integers,
            self._numbers,
            tables,
            len(self.tokens),
            self._on_device.tables.shape[0],
            self._on_device.tables.stride(0),
            tables.stride(0),
            int(info.kv_page_len.max()),
            BLOCK=128,
        )

    def numbers_of(self, ids: Int32Array) -> dict[str, Int64Array]:
        """Returns the row inputs [R] that a call with slots ``ids`` [R] needs, by name."""
        given = {each.name: each.of_slots(ids) for each in self._row_inputs}
        return {name: numbers for name, numbers in given.items() if numbers is not None}

    def load_numbers(self, numbers: dict[str, Int64Array], bucket: int) -> None:
        """Loads the row inputs of a multi-step call; the bucket's other rows have neutral ones."""
        for each in self._row_inputs:
            if each.name in numbers:
                padded: Int64Array = np.full(bucket, each.neutral, np.int64)
                padded[: len(numbers[each.name])] = numbers[each.name]
                target = self._numbers_of_rows[each.name][:bucket]
                target.copy_(staged(padded, target.device), non_blocking=True)

    def prepare(self, bucket: int) -> None:
        """Computes the slots of the step's keys and values, and its attention items."""
        prepare_rows[(bucket,)](
            self.positions,
            self.remaining,
            self.tables,
            self.slots,
            self.drawn,
            self.tables.stride(0),
            PAGE_SIZE=self._page_size,
        )
        self.launches.place(bucket, self.positions)

    def finish(self, bucket: int) -> None:
        """Advances the rows to the next step with the sampled tokens."""
        if self._states is not None:
            self._state_rows.copy_(self._state_rows.flip(0))
        finish_rows[(bucket,)](
            self.sampled,
            self._new_rows,
            self.tokens,
            self.positions,
            self.remaining,
            self._on_device.last_tokens,
            **launch_options(self._starts_early(bucket)),
        )

    def batch(self, bucket: int, names: Sequence[str] = ()) -> PagedBatch:
        """Returns the batch for attention, whose lengths are in the launches' items.

        Args:
            names: of the row inputs that the step reads.
        """
        rows: Int64Array = np.arange(bucket + 1)
        return PagedBatch(
            query_start=self._starts[: bucket + 1],
            kv_len=self.remaining[:bucket],
            page_tables=self.tables[:bucket],
            slots=self.slots[:bucket],
            positions=self.positions[:bucket],
            query_start_cpu=rows,
            kv_len_cpu=rows[1:],
            decoding=bucket,
            page_size=self._page_size,
            scratch={
                LAUNCHES: self.launches,
                STATES: self._state_rows[:, :bucket],
                **{name: self._numbers_of_rows[name][:bucket] for name in names},
            },
        )

    def sampling(self, bucket: int) -> SamplingRows:
        """The rows' sampling settings. Flags are set for all, since the kernel checks each row."""
        return SamplingRows(
            temperature=self.temperature[:bucket],
            top_k=self.top_k[:bucket],
            top_p=self.top_p[:bucket],
            min_p=self.min_p[:bucket],
            seed=self.seed[:bucket],
            position=self.drawn[:bucket],
            all_greedy=False,
            any_top_k=True,
            any_top_p=True,
            any_min_p=True,
        )


class DeviceSlots:
    """Page tables and sampling settings by slot, on the device.

    vLLM's V1 runner keeps such tables for its batch. Here they are indexed by slot, whichever
    requests are in a step: only new requests copy settings, and only new pages are copied.
    """

    def __init__(self, slots: RequestSlots, pages_per_request: int, device: torch.device) -> None:
        num_slots = len(slots.num_pages)
        self._slots = slots
        self._entries = np.zeros(num_slots, np.int64)  # generation on the device
        self._num_pages = np.zeros(num_slots, np.int64)
        self.tables = torch.zeros(num_slots, pages_per_request, dtype=torch.int32, device=device)
        self.integers = torch.zeros(2, num_slots, dtype=torch.int64, device=device)  # top_k, seed
        self.numbers = torch.zeros(3, num_slots, dtype=torch.float32, device=device)
        """Temperature, top_p, min_p."""
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """What the last graph with the slot sampled; the steps write it, for those behind them."""

    def use(self, slots: RequestSlots) -> None:
        """Copies from ``slots`` from now on, which are new and of the same sizes."""
        self._slots = slots
        self._entries[:] = 0
        self._num_pages[:] = 0

    def update(self, ids: Int32Array) -> None:
        """Copies what changed in slots ``ids`` [R], at once, in stream order on a GPU."""
        slots = self._slots
        entered = ids[self._entries[ids] != slots.entries[ids]]
        self._entries[entered] = slots.entries[entered]
        self._num_pages[entered] = 0
        counts = slots.num_pages[ids] - self._num_pages[ids]
        if not (len(entered) or counts.any()):
            return
        rows = np.repeat(ids, counts)
        within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        columns = np.repeat(self._num_pages[ids], counts) + within
        self._num_pages[ids] = slots.num_pages[ids]
        settings = slots.settings
        floats = (settings.temperature, settings.top_p, settings.min_p)
        arrays = [
            np.stack([rows, columns, slots.page_tables[rows, columns]]).astype(np.int64),
            entered.astype(np.int64),
            np.stack([each[entered] for each in (settings.top_k, settings.seed)]),
            np.stack([each[entered] for each in floats]),
        ]
        new, index, integers, numbers = all_to_device(arrays, self.tables.device)
        if len(rows):
            self.tables[new[0], new[1]] = new[2].int()
        if len(entered):
            self.integers[:, index] = integers
            self.numbers[:, index] = numbers
