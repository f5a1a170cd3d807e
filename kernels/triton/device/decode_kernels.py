"""Prepares and advances decode steps on the device."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["rows", "slot_count", "slot_stride", "table_stride", "widest"])
def enter_rows(
    new_rows,  # [4, B] int64: slot or -1, input token or -1, position, steps
    last_tokens,  # [S] int64: of a slot, which a step before has written
    slot_tables,  # [S, P] int32
    slot_integers,  # [2, S] int64
    slot_numbers,  # [3, S] float32
    tokens,  # [B] int64, written, as are all that follow
    positions,  # [B] int64
    remaining,  # [B] int32
    integers,  # [2, B] int64
    numbers,  # [3, B] float32
    tables,  # [B, P] int32
    rows,  # B
    slot_count,  # S
    slot_stride,
    table_stride,
    widest,  # columns in use
    BLOCK: tl.constexpr,
):
    """Loads a row from its slot. Rows without a slot are padding. Program (row).

    The host may not know the token yet that the step before samples: then it is the slot's last.
    """
    row = tl.program_id(0)
    slot = tl.load(new_rows + row)
    used = slot >= 0
    slot = tl.maximum(slot, 0)
    token = tl.load(new_rows + rows + row)
    last = tl.load(last_tokens + slot)
    tl.store(tokens + row, tl.where(token < 0, last, token))
    tl.store(positions + row, tl.load(new_rows + 2 * rows + row))
    tl.store(remaining + row, tl.load(new_rows + 3 * rows + row).to(tl.int32))
    for i in tl.static_range(2):
        value = tl.load(slot_integers + i * slot_count + slot)
        tl.store(integers + i * rows + row, tl.where(used, value, 0))
    for i in tl.static_range(3):
        number = tl.load(slot_numbers + i * slot_count + slot)
        tl.store(numbers + i * rows + row, tl.where(used, number, 0.0))
    for first in range(0, widest, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = (columns < widest) & used
        pages = tl.load(slot_tables + slot * slot_stride + columns, mask)
        tl.store(tables + row.to(tl.int64) * table_stride + columns, pages, mask)


@triton.jit(do_not_specialize=["count"])
def enter_tokens(
    entered,  # [3, T] int64: input token, position, place of its keys and values or -1
    last_tokens,  # [S] int64: of a slot, which a step before has written
    tokens,  # [T] int64, written, as are those that follow
    positions,  # [T] int64
    slots,  # [T] int64
    count,  # T
    BLOCK: tl.constexpr,
):
    """Loads tokens; a negative one, -1 - s, is the last token of slot s. Program (block)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    token = tl.load(entered + i, mask, other=0)
    last = tl.load(last_tokens - 1 - token, mask & (token < 0), other=0)
    tl.store(tokens + i, tl.where(token < 0, last, token), mask)
    tl.store(positions + i, tl.load(entered + count + i, mask, other=0), mask)
    tl.store(slots + i, tl.load(entered + 2 * count + i, mask, other=0), mask)


@triton.jit(do_not_specialize=["table_stride"])
def prepare_rows(
    positions,  # [B] int64, of the token that a row computes
    remaining,  # [B] int32, steps left
    tables,  # [B, P] int32
    slots,  # [B] int64, written: where its keys and values go, -1 = nowhere
    drawn_positions,  # [B] int64, written: of the token that it samples
    table_stride,
    PAGE_SIZE: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0)
    position = tl.load(positions + row)
    slot = tl.full([], -1, tl.int64)
    if tl.load(remaining + row) > 0:
        page = tl.load(tables + row.to(tl.int64) * table_stride + position // PAGE_SIZE)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    tl.store(slots + row, slot)
    tl.store(drawn_positions + row, position + 1)


@triton.jit(do_not_specialize=["rows"])
def map_rows(
    new_rows,  # [4, B] int64, as for `enter_rows`
    items,  # [N, 10] int32, written, see `TileMap`; N is the number of programs
    rows,  # B
    ROWS: tl.constexpr,  # B or more, a power of two
    PROGRAMS: tl.constexpr,  # as `make_tile_map`
    KEY_BLOCK: tl.constexpr,
    MIN_PART: tl.constexpr,
    WINDOW: tl.constexpr,  # 0 for none
):
    """`make_multi_step_map` on the device, for rows with at least one step. Program (place).

    Each program computes the parts of all rows, so that none waits for another. It then writes the
    items of the row of its number, and clears the item of its number where there is none. Items
    are in the order of their rows' longest part.
    """
    place = tl.program_id(0)
    row = tl.arange(0, ROWS)
    used = tl.load(new_rows + row, row < rows, other=-1) >= 0
    position = tl.load(new_rows + 2 * rows + row, used, other=0).to(tl.int32)
    end = position + tl.load(new_rows + 3 * rows + row, used, other=0).to(tl.int32)
    first = tl.maximum(position - WINDOW + 1, 0) if WINDOW else tl.zeros_like(end)
    keys = tl.where(used, end - first, 0)

    share = tl.maximum(tl.cdiv(tl.sum(keys), PROGRAMS), MIN_PART)
    longest = tl.cdiv(share, KEY_BLOCK) * KEY_BLOCK
    parts = tl.maximum(tl.cdiv(keys, longest), 1)
    even = tl.cdiv(tl.cdiv(keys, parts), KEY_BLOCK) * KEY_BLOCK
    parts = tl.where(used, tl.maximum(tl.cdiv(keys, tl.maximum(even, 1)), 1), 0)
    even = tl.where(used, even, 0)

    if place >= tl.sum(parts):
        tl.store(items + place * 10 + 2, 0)  # no queries
    mine = row == place
    own_even, own_parts = tl.sum(tl.where(mine, even, 0)), tl.sum(tl.where(mine, parts, 0))
    own_first, own_end = tl.sum(tl.where(mine, first, 0)), tl.sum(tl.where(mine, end, 0))
    own_position = tl.sum(tl.where(mine, position, 0))
    earlier = (even > own_even) | ((even == own_even) & (row < place))
    item = items + tl.sum(tl.where(earlier, parts, 0)) * 10
    first_part = tl.sum(tl.where((row < place) & (parts > 1), parts, 0))
    for number in range(0, own_parts):
        first_key = own_first + number * own_even
        tl.store(item, place)
        tl.store(item + 1, place)
        tl.store(item + 2, 1)
        tl.store(item + 3, own_position)
        tl.store(item + 4, first_key)
        tl.store(item + 5, tl.minimum(first_key + own_even, own_end))
        tl.store(item + 6, tl.where(own_parts > 1, first_part + number, -1))
        tl.store(item + 7, tl.where(number == 0, 1, 0))
        tl.store(item + 8, first_part)
        tl.store(item + 9, own_parts)
        item += 10


@triton.jit
def place_items(
    items,  # [N, 10] int32, see `TileMap`; positions are written
    positions,  # [B] int64
):
    """Program (item)."""
    item = items + tl.program_id(0) * 10
    position = tl.load(positions + tl.load(item))
    tl.store(item + 3, position.to(tl.int32))


@triton.jit
def finish_rows(
    sampled,  # [B] int64
    slots,  # [B] int64, -1 for padding
    tokens,  # [B] int64, written: the next step's input
    positions,  # [B] int64, written
    remaining,  # [B] int32, written
    last_tokens,  # [S] int64, written: the input of the next call's first step
    PDL: tl.constexpr = False,
):
    """Program (row). A row without steps left does not change."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    left = tl.load(remaining + row)
    if left > 0:
        token = tl.maximum(tl.load(sampled + row), 0)
        tl.store(tokens + row, token)
        tl.store(last_tokens + tl.load(slots + row), token)
        tl.store(positions + row, tl.load(positions + row) + 1)
        tl.store(remaining + row, left - 1)
