"""Paged attention on a GPU: one kernel for decode and prefill tiles that also merges parts."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def merge_parts(
    part_out,  # as in `attend_tiles`
    part_lse,
    places,  # [ROWS] of the first part's rows
    parts,
    valid,  # [ROWS]
    dv,  # [VALUE_WIDTH]
    KV_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS_AHEAD: tl.constexpr,  # parts that are on their way at once
):
    """Merges the parts of a tile to [ROWS, VALUE_WIDTH], by their shares of the softmax.

    The results of other programs are read from the L2 cache, which all share. A read takes
    a microsecond, so several are on their way.
    """
    written = valid[:, None] & (dv[None, :] < VALUE_DIM)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for part in tl.range(0, parts, num_stages=PARTS_AHEAD):
        place = places + part * (KV_HEADS * ROWS)
        lse = tl.load(part_lse + place, mask=valid, other=float("-inf"), cache_modifier=".cg")
        partial_out = tl.load(
            part_out + place[:, None] * VALUE_DIM + dv[None, :],
            mask=written,
            other=0.0,
            cache_modifier=".cg",
        )
        new_highest = tl.maximum(highest, lse)
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        share = tl.exp2(lse - shift)
        shrink = tl.exp2(highest - shift)
        summed = summed * shrink[:, None] + partial_out * share[:, None]
        total = total * shrink + share
        highest = new_highest
    return summed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["table_stride"])  # as wide as a step's longest row
def attend_tiles(
    query,  # [T, H, Dk]
    k_pages,  # [num_pages, PAGE_SIZE, Hkv, Dk]
    v_pages,  # [num_pages, PAGE_SIZE, Hkv, Dv]
    tables,  # [R, P] int32
    items,  # [N, 10] int32, see `TileMap`
    sinks,  # [H], any pointer without SINKS
    out,  # [T, H, Dv]
    part_out,  # [parts, Hkv, ROWS, Dv] fp32
    part_lse,  # [parts, Hkv, ROWS] fp32, base 2
    arrived,  # [parts, Hkv] int32, parts of a tile that are done; zeros before and after
    query_stride,
    table_stride,
    scale,
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,  # KEY_DIM up to a power of two
    VALUE_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile: queries times GROUP, padded
    KEYS: tl.constexpr,  # read at once
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    PARTS_AHEAD: tl.constexpr,  # of `merge_parts`
    PDL: tl.constexpr = False,
):
    """One tile of queries with all heads of one group, over one part of the keys.

    Program (key head, item). Row m of the tile is query m // GROUP with head m % GROUP of the
    group: each key is read once for all of them. Softmax online and in base 2 (FlashAttention-2).
    The program that finishes the last part of a tile merges all parts, always in their order (like
    the last block of a reduction in CUDA's threadFenceReduction sample).

    With PDL, items and page tables have to be complete before the kernel before this one starts:
    they are read before the wait. Every program waits, so that a kernel that waits for this one
    waits for those before it too.
    """
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 10
    queries = tl.load(item + 2)  # all fields at once: one round trip
    row = tl.load(item).to(tl.int64)
    token = tl.load(item + 1).to(tl.int64)
    position = tl.load(item + 3)
    first_key = tl.load(item + 4)
    end_key = tl.minimum(tl.load(item + 5), position + queries)
    part = tl.load(item + 6)
    first = tl.load(item + 8).to(tl.int64)
    parts = tl.load(item + 9)
    if queries == 0:
        if PDL:
            gdc_wait()
        return

    m = tl.arange(0, ROWS)
    head = kv_head * GROUP + m % GROUP
    valid = m // GROUP < queries
    tokens = token + m // GROUP
    positions = position + m // GROUP
    dk = tl.arange(0, KEY_WIDTH)
    dv = tl.arange(0, VALUE_WIDTH)
    # The pages of a block are read while the block before it is computed. A read of them within the
    # block would keep its keys and values from being read ahead.
    table = tables + row * table_stride
    ahead = first_key + tl.arange(0, KEYS)
    page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end_key, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q = tl.load(
        query + tokens[:, None] * query_stride + head[:, None] * KEY_DIM + dk[None, :],
        mask=valid[:, None] & (dk[None, :] < KEY_DIM),
        other=0.0,
    )

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        if tl.load(item + 7) == 1:
            highest = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
    summed = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for start in range(first_key, end_key, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end_key
        slot = page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE
        ahead = key + KEYS
        page = tl.load(table + ahead // PAGE_SIZE, mask=ahead < end_key, other=0)
        k = tl.load(
            k_pages + (slot[None, :] * KV_HEADS + kv_head) * KEY_DIM + dk[:, None],
            mask=inside[None, :] & (dk[:, None] < KEY_DIM),
            other=0.0,
        ).to(q.dtype)
        scores = tl.dot(q, k, input_precision="ieee") * scale  # [ROWS, KEYS]
        if SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))
        visible = inside[None, :] & (key[None, :] <= positions[:, None])
        if WINDOW:
            visible = visible & (key[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # nothing seen yet
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(highest - shift)
        v = tl.load(
            v_pages + (slot[:, None] * KV_HEADS + kv_head) * VALUE_DIM + dv[None, :],
            mask=inside[:, None] & (dv[None, :] < VALUE_DIM),
            other=0.0,
        ).to(q.dtype)
        summed = summed * shrink[:, None]
        summed = tl.dot(weights.to(v.dtype), v, summed, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = new_highest

    result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    written = valid[:, None] & (dv[None, :] < VALUE_DIM)
    if part < 0:
        target = out + (tokens[:, None] * (KV_HEADS * GROUP) + head[:, None]) * VALUE_DIM
        tl.store(target + dv[None, :], result.to(out.dtype.element_ty), mask=written)
    else:
        place = (part.to(tl.int64) * KV_HEADS + kv_head) * ROWS + m
        tl.store(part_out + place[:, None] * VALUE_DIM + dv[None, :], result, mask=written)
        lse = tl.where(total == 0.0, float("-inf"), highest + tl.log2(total))
        tl.store(part_lse + place, lse, mask=valid)
        tl.debug_barrier()  # all threads have stored: the arrival releases what they wrote
        counter = arrived + first * KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
            merged = merge_parts(
                part_out,
                part_lse,
                (first * KV_HEADS + kv_head) * ROWS + m,
                parts,
                valid,
                dv,
                KV_HEADS,
                VALUE_DIM,
                VALUE_WIDTH,
                ROWS,
                PARTS_AHEAD,
            )
            target = out + (tokens[:, None] * (KV_HEADS * GROUP) + head[:, None]) * VALUE_DIM
            tl.store(target + dv[None, :], merged.to(out.dtype.element_ty), mask=written)
            tl.store(counter, 0)
