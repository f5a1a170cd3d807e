"""Prepares and advances decode steps on the device."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "slot_count", "slot_stride", "table_stride", "widest"])
def enter_rows(
    new_rows,  # [4, B] int64: slot or -1, input token, position, steps
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
    """Loads a row from its slot. Rows without a slot are padding. Program (row)."""
    row = tl.program_id(0)
    slot = tl.load(new_rows + row)
    used = slot >= 0
    slot = tl.maximum(slot, 0)
    tl.store(tokens + row, tl.load(new_rows + rows + row))
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
    tokens,  # [B] int64, written: the next step's input
    positions,  # [B] int64, written
    remaining,  # [B] int32, written
):
    """Program (row). A row without steps left does not change."""
    row = tl.program_id(0)
    left = tl.load(remaining + row)
    if left > 0:
        tl.store(tokens + row, tl.maximum(tl.load(sampled + row), 0))
        tl.store(positions + row, tl.load(positions + row) + 1)
        tl.store(remaining + row, left - 1)
