"""Assigns queries and keys to the programs of an attention launch, on the host.

A row's queries are split into tiles. A tile's keys are split into parts if there would be too few
programs to fill the GPU, or one much longer than the others (split-KV: Flash-Decoding, 2023; a map
for each step: FlashInfer, arXiv 2501.01005). This is plain NumPy and independent of devices.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

ITEM_FIELDS = (
    "row",
    "token",
    "queries",
    "position",
    "first_key",
    "end_key",
    "part",
    "is_first",
    "first_part",
    "parts",
)
MIN_PART = 128
"""Keys of the smallest part, since merging shorter ones costs more than it saves."""
WHOLE = -1
"""In an item's ``part``: the item sees all keys of its tile and writes the result itself."""


@dataclass(frozen=True, slots=True, eq=False)
class TileMap:
    """The work of one launch, longest item first.

    An item attends with the queries ``token .. token + queries`` of T over the keys ``first_key ..
    end_key`` of ``row``; the first query is at ``position`` of its request. The result goes to
    entry ``part`` of the partial results, unless it is `WHOLE`; its tile has the ``parts`` entries
    from ``first_part``. ``is_first`` is 1 in the one item of each tile that adds the sink.
    """

    items: Int32Array  # [N, 10], ITEM_FIELDS
    parts: int  # entries of the partial results


def make_tile_map(
    query_start: npt.ArrayLike,
    kv_len: npt.ArrayLike,
    *,
    first_row: int = 0,
    tile_queries: int = 1,
    key_block: int = 64,
    programs: int = 1,
    min_part: int = MIN_PART,
    window: int | None = None,
) -> TileMap:
    """The tile map of some rows of a step.

    Args:
        query_start: [R + 1] where each row's chunk starts in T.
        kv_len: [R] keys visible to each row's last query.
        first_row: number of the first of these rows in the step's page tables.
        tile_queries: largest number of queries of a tile.
        key_block: keys that a program reads at once; parts are multiples of it.
        programs: smallest number of items, if there is enough work.
        min_part: keys of the smallest part.
        window: largest number of keys that a query sees, None for all.

    Returns:
        At most ``programs + tiles`` items.
    """
    starts = np.asarray(query_start, np.int64)
    lengths = np.asarray(kv_len, np.int64)
    chunks = np.diff(starts)
    tiles_of = -(-chunks // tile_queries)
    row = np.repeat(np.arange(len(chunks)), tiles_of)  # [tiles]
    within = _count_up(tiles_of) * tile_queries
    queries = np.minimum(chunks[row] - within, tile_queries)
    position = (lengths - chunks)[row] + within
    end = position + queries
    first = np.zeros_like(end) if window is None else np.maximum(position - window + 1, 0)

    share = -(-int((end - first).sum()) // programs)
    part_len = -(-max(share, min_part) // key_block) * key_block
    parts = np.maximum(-(-(end - first) // part_len), 1)
    even = _round_up(-(-(end - first) // parts), key_block)  # of each tile: parts alike in length
    parts = np.maximum(-(-(end - first) // even), 1)

    tile = np.repeat(np.arange(len(row)), parts)  # [items]
    number = _count_up(parts)
    first_key = first[tile] + number * even[tile]
    end_key = np.minimum(first_key + even[tile], end[tile])
    split = parts > 1
    place = np.cumsum(np.where(split, parts, 0)) - parts  # of a split tile's first part
    token = starts[row] + within
    items = np.stack(
        [
            row[tile] + first_row,
            token[tile],
            queries[tile],
            position[tile],
            first_key,
            end_key,
            np.where(split[tile], place[tile] + number, WHOLE),
            number == 0,
            place[tile],
            parts[tile],
        ],
        axis=1,
    ).astype(np.int32)
    order = np.argsort(first_key - end_key, kind="stable")
    return TileMap(np.ascontiguousarray(items[order]), int(parts[split].sum()))


def _count_up(counts: Int64Array) -> Int64Array:
    """[3, 1, 2] -> [0, 1, 2, 0, 0, 1]."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)


def _round_up(values: Int64Array, multiple: int) -> Int64Array:
    return -(-values // multiple) * multiple


def make_multi_step_map(
    kv_len: npt.ArrayLike,
    steps: npt.ArrayLike,
    *,
    key_block: int,
    programs: int,
    window: int | None = None,
) -> TileMap:
    """One map for several decode steps of each row, so that none is computed between them.

    CUDA graphs have theirs made on the device (`map_rows`), which this one is held against.

    Args:
        kv_len: [R] keys in the cache before the first step.
        steps: [R] number of steps of each row, at least 1.

    Returns:
        Items of one query each. A part may end after the keys of an early step, or begin before the
        window of a late one; the kernel clips it to what the query sees.
    """
    counts = np.asarray(steps, np.int64)
    starts = np.append(0, np.cumsum(counts))
    lengths = np.asarray(kv_len, np.int64) + counts
    longest = int(counts.max(initial=1))
    tile_map = make_tile_map(
        starts,
        lengths,
        tile_queries=longest,
        key_block=key_block,
        programs=programs,
        window=window,
    )
    tile_map.items[:, ITEM_FIELDS.index("token")] = tile_map.items[:, 0]
    tile_map.items[:, ITEM_FIELDS.index("queries")] = 1
    return tile_map
