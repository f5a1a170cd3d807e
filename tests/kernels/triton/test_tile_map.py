"""The map of tiles: every query sees each of its keys once, and the work is cut evenly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from rayfin.kernels.triton.device.decode_kernels import map_rows
from rayfin.kernels.triton.tile_map import (
    ITEM_FIELDS,
    MIN_PART,
    WHOLE,
    TileMap,
    make_multi_step_map,
    make_tile_map,
)


def seen_keys(tile_map: TileMap, tokens: int) -> list[list[int]]:
    """The keys that each query of T gets, in order; with the tile's last query's for them all."""
    seen: list[list[int]] = [[] for _ in range(tokens)]
    for _, token, queries, position, first, end, *_ in tile_map.items.tolist():
        for query in range(queries):
            seen[token + query] += [key for key in range(first, end) if key <= position + query]
    return [sorted(keys) for keys in seen]


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=6),
    tile_queries=st.sampled_from([1, 5, 32]),
    programs=st.sampled_from([1, 7, 64]),
    window=st.sampled_from([None, 1, 30]),
)
def test_each_key_once(
    rows: list[tuple[int, int]], tile_queries: int, programs: int, window: int | None
) -> None:
    chunks = np.array([chunk for _, chunk in rows])
    starts = np.append(0, np.cumsum(chunks))
    lengths = np.array([cached + chunk for cached, chunk in rows])
    made = make_tile_map(
        starts,
        lengths,
        tile_queries=tile_queries,
        key_block=16,
        programs=programs,
        min_part=32,
        window=window,
    )
    tiles = int((-(-chunks // tile_queries)).sum())
    assert len(made.items) <= tiles + programs
    seen = seen_keys(made, int(starts[-1]))
    for row, (cached, chunk) in enumerate(rows):
        for query in range(chunk):
            position = cached + query
            keys = seen[starts[row] + query]
            first = 0 if window is None else max(0, position - window + 1)
            wanted = [key for key in keys if key >= first]  # the kernel masks those before
            assert wanted == list(range(first, position + 1))
    assert (made.items[:, 4] < made.items[:, 5]).all()
    length = made.items[:, 5] - made.items[:, 4]
    assert (np.diff(length) <= 0).all(), "the longest comes first"
    parts = sorted(made.items[made.items[:, 6] != WHOLE, 6].tolist())
    assert parts == list(range(made.parts))
    tiles_of = {(item[1], item[8], item[9]) for item in made.items.tolist() if item[6] != WHOLE}
    merged = [range(place, place + count) for _, place, count in tiles_of]
    assert sorted(part for own in merged for part in own) == parts
    split = made.items[made.items[:, 6] != WHOLE]
    assert ((split[:, 8] <= split[:, 6]) & (split[:, 6] < split[:, 8] + split[:, 9])).all()
    assert made.items[:, 7].sum() == tiles


def test_a_long_row_is_shared_and_short_ones_are_not() -> None:
    made = make_tile_map(np.arange(5), [8000, 64, 100, 3], programs=16, key_block=64)
    per_row = np.bincount(made.items[:, 0])
    assert per_row.tolist() == [16, 1, 1, 1]
    own = made.items[made.items[:, 0] == 0]
    assert (own[:, 8:] == [0, 16]).all() and sorted(own[:, 6]) == list(range(16))
    assert made.parts == 16
    assert (made.items[:, 5] - made.items[:, 4]).max() <= 512


def test_many_rows_are_left_whole() -> None:
    made = make_tile_map(np.arange(257), np.full(256, 600), programs=64)
    assert len(made.items) == 256 and made.parts == 0


def test_rows_are_numbered_in_their_step() -> None:
    made = make_tile_map([3, 10], [40], first_row=3, tile_queries=4)
    assert sorted(made.items[:, :4].tolist()) == [[3, 3, 4, 33], [3, 7, 3, 37]]


@pytest.mark.parametrize("window", [None, 40])
def test_a_lease_needs_one_map(window: int | None) -> None:
    """What any of its steps sees is in it, in one item of each row and key."""
    kv_len, steps = np.array([500, 3, 70]), np.array([4, 1, 16])
    made = make_multi_step_map(kv_len, steps, key_block=16, programs=8, window=window)
    assert (made.items[:, 2] == 1).all() and (made.items[:, 1] == made.items[:, 0]).all()
    for row in range(3):
        own = made.items[made.items[:, 0] == row]
        keys = [key for item in own for key in range(item[4], item[5])]
        assert len(keys) == len(set(keys))
        for step in range(steps[row]):
            position = kv_len[row] + step
            first = 0 if window is None else max(0, position - window + 1)
            assert set(range(first, position + 1)) <= set(keys)
        assert (own[:, 9] == len(own)).all()
    assert made.items[:, 7].sum() == 3


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", [0, 1, 5, 13])
def test_the_device_makes_the_same_map(device: torch.device, rows: int, window: int | None) -> None:
    """The items of the host's map and empty ones; the longest rows come first."""
    generator = np.random.default_rng(rows)
    most, programs = 13, 8
    kv_len = np.where(generator.random(rows) < 0.3, 900, generator.integers(1, 400, rows))
    steps = generator.integers(1, 17, rows)
    new_rows = np.zeros((4, most), np.int64)
    new_rows[0, rows:] = -1
    new_rows[0, :rows] = generator.permutation(rows)
    new_rows[2:, :rows] = kv_len, steps
    items = torch.full((rows + programs, len(ITEM_FIELDS)), 77, dtype=torch.int32, device=device)
    map_rows[(len(items),)](
        torch.from_numpy(new_rows).to(device),
        items,
        most,
        ROWS=16,
        PROGRAMS=programs,
        KEY_BLOCK=16,
        MIN_PART=MIN_PART,
        WINDOW=window or 0,
    )
    given = items.cpu().numpy()
    used = given[given[:, 2] > 0]
    assert (given[: len(used), 2] == 1).all() and (given[len(used) :, 2] == 0).all()
    wanted = make_multi_step_map(kv_len, steps, key_block=16, programs=programs, window=window)
    for made in (used, wanted.items):
        made[made[:, 6] == WHOLE, 8] = 0  # a whole row has no first part
    assert sorted(used.tolist()) == sorted(wanted.items.tolist())
    blocks = -(-(used[:, 5] - used[:, 4]) // 16)
    longest = [blocks[used[:, 0] == row].max() for row in used[:, 0]]
    assert (np.diff(longest) <= 0).all(), "the longest rows come first"
