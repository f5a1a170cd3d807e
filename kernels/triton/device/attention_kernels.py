"""Paged attention on a GPU: one kernel for decode and prefill tiles that also merges parts."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST = tl.constexpr(2.0**-100)  # a row of queries below it is as good as zero

# How keys and values of fp8 pages become numbers of a product: in the dtype of the queries, or in
# fp16, which holds e4m3 exactly. Then they are read as bytes and split in pairs, or as words, which
# Triton's operations or PTX convert.
CAST = tl.constexpr(0)
PAIRS = tl.constexpr(1)
WORDS = tl.constexpr(2)
PTX = tl.constexpr(3)
WORD = tl.constexpr(
    "{ .reg .b16 low, high; .reg .b32 first, second; mov.b32 {low, high}, $4;"
    " cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;"
    " mov.b32 {$0, $1}, first; mov.b32 {$2, $3}, second; }"
)


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


@triton.jit
def octet_of(words, PLACE: tl.constexpr):
    """One of the four e4m3 numbers of words, in fp16."""
    octet = ((words >> (8 * PLACE)) & 255).to(tl.uint8)
    return octet.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def halves_of(words, KEYS: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr):
    """Words [KEYS, WIDTH / 4] of four e4m3 numbers -> [KEYS, WIDTH] fp16, exact."""
    if FORM == PTX:
        halves: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        a, b, c, d = tl.inline_asm_elementwise(WORD, "=h,=h,=h,=h,r", [words], halves, True, 1)
    else:
        a, b = octet_of(words, 0), octet_of(words, 1)
        c, d = octet_of(words, 2), octet_of(words, 3)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [KEYS, WIDTH])


@triton.jit
def read_words(
    pages,  # int32
    slot,  # [KEYS] int64
    kv_head,
    inside,  # [KEYS]
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Keys or values of fp8 pages, [KEYS, WIDTH] in fp16."""
    d = tl.arange(0, WIDTH // 4)
    place = (slot[:, None] * KV_HEADS + kv_head) * (DIM // 4) + d[None, :]
    if MASKED:
        words = tl.load(pages + place, inside[:, None] & (d[None, :] < DIM // 4), other=0)
    elif DIM < WIDTH:
        words = tl.load(pages + place, d[None, :] < DIM // 4, other=0)
    else:
        words = tl.load(pages + place)
    return halves_of(words, slot.shape[0], WIDTH, FORM)


@triton.jit
def read_keys(
    k_pages,
    slot,
    kv_head,
    inside,
    dtype: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Keys of a block, [WIDTH, KEYS]."""
    if FORM == WORDS or FORM == PTX:
        words = read_words(k_pages, slot, kv_head, inside, KV_HEADS, DIM, WIDTH, MASKED, FORM)
        k = tl.trans(words)
    else:
        d = tl.arange(0, WIDTH)
        place = k_pages + (slot[None, :] * KV_HEADS + kv_head) * DIM + d[:, None]
        if MASKED:
            k = tl.load(place, inside[None, :] & (d[:, None] < DIM), other=0.0).to(dtype)
        elif DIM < WIDTH:
            k = tl.load(place, d[:, None] < DIM, other=0.0).to(dtype)
        else:
            k = tl.load(place).to(dtype)
    return k


@triton.jit
def read_values(
    v_pages,
    slot,
    kv_head,
    inside,
    dtype: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Values of a block, [KEYS, WIDTH]."""
    if FORM == WORDS or FORM == PTX:
        v = read_words(v_pages, slot, kv_head, inside, KV_HEADS, DIM, WIDTH, MASKED, FORM)
    else:
        d = tl.arange(0, WIDTH)
        place = v_pages + (slot[:, None] * KV_HEADS + kv_head) * DIM + d[None, :]
        if MASKED:
            v = tl.load(place, inside[:, None] & (d[None, :] < DIM), other=0.0)
        elif DIM < WIDTH:
            v = tl.load(place, d[None, :] < DIM, other=0.0)
        else:
            v = tl.load(place)
        if FORM == PAIRS:
            # In two halves, so that bytes leave shared memory in a layout of whole words.
            even, odd = tl.split(tl.reshape(v, [v.shape[0], WIDTH // 2, 2]))
            v = tl.reshape(tl.join(even.to(dtype), odd.to(dtype)), [even.shape[0], WIDTH])
        else:
            v = v.to(dtype)
    return v


@triton.jit
def read_page_ids(
    table,  # of the row
    start,  # a multiple of PAGE_SIZE with BY_PAGE
    end_key,
    KEYS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BY_PAGE: tl.constexpr,  # one load for each page of the block, not for each key
):
    """Reads the page of each key of a block [KEYS]."""
    key = tl.arange(0, KEYS)
    if BY_PAGE:
        first = table + start // PAGE_SIZE
        page = tl.zeros([KEYS], tl.int32) + tl.load(first, mask=start < end_key, other=0)
        for number in tl.static_range(1, KEYS // PAGE_SIZE):
            later = tl.load(first + number, mask=start + number * PAGE_SIZE < end_key, other=0)
            page = tl.where(key < number * PAGE_SIZE, page, later)
    else:
        page = tl.load(table + (start + key) // PAGE_SIZE, mask=start + key < end_key, other=0)
    return page


@triton.jit
def attend_block(
    q,  # [ROWS, KEY_WIDTH]
    k_pages,
    v_pages,
    page,  # [KEYS] of the block
    start,  # its first key
    end_key,
    positions,  # [ROWS]
    highest,  # [ROWS], base 2
    total,  # [ROWS], or [ROWS, KEYS] with PER_KEY
    summed,  # [ROWS, VALUE_WIDTH]
    kv_head,
    factor,  # [ROWS], above zero: on scores
    softcap,
    window,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,  # some query does not see some key
    PER_KEY: tl.constexpr,
    FORM: tl.constexpr,
    BY_PAGE: tl.constexpr,
):
    """Adds a block of keys; returns highest, total and summed."""
    key = start + tl.arange(0, page.shape[0])
    inside = key < end_key
    within = key % PAGE_SIZE
    if BY_PAGE:
        within = tl.arange(0, page.shape[0]) % PAGE_SIZE
        if PAGE_SIZE > page.shape[0]:
            within += start % PAGE_SIZE
    slot = page.to(tl.int64) * PAGE_SIZE + within
    k = read_keys(
        k_pages, slot, kv_head, inside, q.dtype, KV_HEADS, KEY_DIM, KEY_WIDTH, MASKED, FORM
    )
    scores = tl.dot(q, k, input_precision="ieee")  # [ROWS, KEYS]
    if SOFTCAP:
        scores *= factor[:, None]
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))
        factor = tl.full(highest.shape, LOG2_E, tl.float32)
    if MASKED:
        visible = inside[None, :] & (key[None, :] <= positions[:, None])
        if WINDOW:
            visible = visible & (key[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores * factor[:, None], float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # nothing seen yet
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(highest - shift)
    else:
        # Factors multiply a row's maximum, and each score within a subtraction.
        new_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor[:, None] - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
    v = read_values(
        v_pages, slot, kv_head, inside, q.dtype, KV_HEADS, VALUE_DIM, VALUE_WIDTH, MASKED, FORM
    )
    summed = summed * shrink[:, None]
    summed = tl.dot(weights.to(v.dtype), v, summed, input_precision="ieee")
    if PER_KEY:
        total = total * shrink[:, None] + weights
    else:
        total = total * shrink + tl.sum(weights, 1)
    return new_highest, total, summed


@triton.jit(do_not_specialize=["table_stride"])  # as wide as a step's longest row
def attend_tiles(
    query,  # [T, H, Dk]
    k_pages,  # [num_pages, PAGE_SIZE, Hkv, Dk]; WORDS, PTX: [.., Dk / 4] int32
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
    TWO_LOOPS: tl.constexpr = False,  # blocks that all queries see come first, without a mask
    PER_KEY: tl.constexpr = False,  # sums of weights are added up behind the loop
    FORM: tl.constexpr = 0,
    BY_PAGE: tl.constexpr = False,  # of `read_page_ids`; items begin with a block
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
    page = read_page_ids(table, first_key, end_key, KEYS, PAGE_SIZE, BY_PAGE)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    q = tl.load(
        query + tokens[:, None] * query_stride + head[:, None] * KEY_DIM + dk[None, :],
        mask=valid[:, None] & (dk[None, :] < KEY_DIM),
        other=0.0,
    )

    factor = tl.full([ROWS], 1.0, tl.float32) * (scale if SOFTCAP else scale * LOG2_E)
    if FORM != CAST:
        # Powers of two bring each row of queries into fp16's range.
        largest = tl.max(tl.abs(q.to(tl.float32)), 1)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        power = tl.maximum(power, SMALLEST)
        q = (q.to(tl.float32) / power[:, None]).to(tl.float16)
        factor *= power

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    sink = tl.zeros([ROWS], tl.float32)
    if SINKS:
        if tl.load(item + 7) == 1:
            highest = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
            sink += 1.0
    total = sink
    if PER_KEY:
        total = tl.where(tl.arange(0, KEYS)[None, :] == 0, sink[:, None], 0.0)
    summed = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    masked_from = first_key
    if TWO_LOOPS and not WINDOW:
        seen = tl.minimum(end_key, position + 1) - first_key  # by the first query, so by all
        masked_from += tl.maximum(seen, 0) // KEYS * KEYS
        for start in range(first_key, masked_from, KEYS):
            whole_page = page
            page = read_page_ids(table, start + KEYS, end_key, KEYS, PAGE_SIZE, BY_PAGE)
            highest, total, summed = attend_block(
                q,
                k_pages,
                v_pages,
                whole_page,
                start,
                end_key,
                positions,
                highest,
                total,
                summed,
                kv_head,
                factor,
                softcap,
                window,
                KV_HEADS,
                KEY_DIM,
                VALUE_DIM,
                KEY_WIDTH,
                VALUE_WIDTH,
                PAGE_SIZE,
                WINDOW,
                SOFTCAP,
                False,
                PER_KEY,
                FORM,
                BY_PAGE,
            )
    for start in range(masked_from, end_key, KEYS):
        block_page = page
        page = read_page_ids(table, start + KEYS, end_key, KEYS, PAGE_SIZE, BY_PAGE)
        highest, total, summed = attend_block(
            q,
            k_pages,
            v_pages,
            block_page,
            start,
            end_key,
            positions,
            highest,
            total,
            summed,
            kv_head,
            factor,
            softcap,
            window,
            KV_HEADS,
            KEY_DIM,
            VALUE_DIM,
            KEY_WIDTH,
            VALUE_WIDTH,
            PAGE_SIZE,
            WINDOW,
            SOFTCAP,
            True,
            PER_KEY,
            FORM,
            BY_PAGE,
        )
    if PER_KEY:
        total = tl.sum(total, 1)

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
