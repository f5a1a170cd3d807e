"""Samples one token per row without a sort, by a search for thresholds.

Programs of a row's blocks read the logits: the first kernel finds the highest one, the second the
top ones of rows with filters, the third sums the weights. The fourth, with one program per row,
picks the block and the token. Integer weights have the same sums in any order.

Top-k and top-p keep the tokens above some logit. A search finds it by counting the tokens, or
summing the probability, above a guess (the pivots of FlashInfer's sampling, 2025). Integer
weights and exact comparisons keep exactly the tokens that `rayfin.kernels.sampling` keeps. The
search is among the top tokens of each block, in registers. If they may not be all that are kept, it
reads the row again for each guess. The second kernel finds the top tokens in the same way, by a
guess that few tokens of the block are above.

The draw inverts the distribution function at the hash of (seed, position). Like Gumbel noise from
both it depends on nothing else in the batch, and it is the draw of the CPU.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOWEST = tl.constexpr(-28.0)  # exp(-28) * 2**40 < 1: smaller logits have no weight
NONE = tl.constexpr(2147483647)
NO_KEY = tl.constexpr(-(2**63))
LOW_BITS = tl.constexpr(0xFFFFFFFF)
LOWEST_ORDER = tl.constexpr(-2147483648)
PASSES = tl.constexpr(6)
"""At most, of `narrow`. One divides the range of a threshold by 5."""


@triton.jit
def order_of(x):
    """fp32 -> int32 with the same order: IEEE 754 bits, with negative numbers reversed."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0.0 and 0.0 are a tie
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(order):
    """The inverse of `order_of`."""
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_of(x, index):
    """fp32, int32 -> int64 that sorts by higher logit, then by lower index: `sort_keys`."""
    return (order_of(x).to(tl.int64) << 32) | (index.to(tl.int64) ^ LOW_BITS)


@triton.jit
def weight_of(x):
    """Unnormalised probability of a logit <= 0, as a 40-bit integer: `fixed_point_weights`."""
    return (tl.exp(x) * 1099511627776.0).to(tl.int64)


@triton.jit
def mix(x):
    """splitmix64's finaliser, uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform_of(seed, position):
    """The number in [0, 1) of (seed, position): `rayfin.kernels.sampling.sample.uniform`."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    start = mix(seed.to(tl.uint64) + golden)
    bits = mix(start + (position.to(tl.uint64) + 1) * golden) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2**-53


@triton.jit
def scaled(row, start, vocabulary, highest, temperature, BLOCK: tl.constexpr):
    """Logits start .. start + BLOCK as the filters see them: at most 0, -inf past the end."""
    index = start + tl.arange(0, BLOCK)
    x = tl.load(row + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    return (x - highest) / temperature


@triton.jit
def search(
    row, vocabulary, highest, temperature, floor, needed, MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The highest order t >= floor with ``needed`` mass or tokens at t or above, else ``floor``.

    It tests three guesses per pass, since reading the logits is the cost.
    """
    low = floor
    high = tl.full([], 1, tl.int32)  # 0.0 is the highest, its order is 0
    while high - low > 1:
        distance = high - low
        a = low + distance // 4
        b = low + distance // 2
        c = high - distance // 4
        above_a = tl.zeros([], tl.int64)
        above_b = tl.zeros([], tl.int64)
        above_c = tl.zeros([], tl.int64)
        for start in range(0, vocabulary, BLOCK):
            x = scaled(row, start, vocabulary, highest, temperature, BLOCK)
            order = order_of(x)
            if MASS:
                amount = weight_of(x)
            else:
                amount = tl.full([BLOCK], 1, tl.int64)
            above_a += tl.sum(tl.where(order >= a, amount, 0))
            above_b += tl.sum(tl.where(order >= b, amount, 0))
            above_c += tl.sum(tl.where(order >= c, amount, 0))
        enough_a = above_a.to(tl.float64) >= needed
        enough_b = above_b.to(tl.float64) >= needed
        enough_c = above_c.to(tl.float64) >= needed
        new_low = tl.where(enough_c, c, tl.where(enough_b, b, tl.where(enough_a, a, low)))
        high = tl.where(
            enough_c, high, tl.where(enough_b, c, tl.where(enough_a, b, tl.maximum(a, low + 1)))
        )
        low = new_low
    return low


@triton.jit
def floor_of(min_p):
    """The order of the lowest logit that min_p keeps, and that has any weight."""
    lowest = tl.full([], LOWEST, tl.float32)
    return order_of(tl.maximum(tl.log(tl.maximum(min_p, 1e-13)), lowest))


@triton.jit
def narrow(x, low, high, lowest, WANTED: tl.constexpr, MOST: tl.constexpr):
    """A threshold that at most ``MOST`` values are above: the best guess between low and high.

    At most ``MOST`` values are above ``high``, and more are above ``low``, or it is under
    ``lowest``. The guesses end once ``WANTED`` values are above one, or at one under ``lowest``.
    """
    above = tl.zeros([], tl.int64)
    passes = tl.zeros([], tl.int32)
    while (passes < PASSES) & (above < WANTED) & (high > lowest):
        step = (high - low) * 0.2
        a = low + step
        b = low + 2 * step
        c = low + 3 * step
        d = low + 4 * step
        # Four counts of less than 2**15 in one sum.
        ones = (x > a).to(tl.int64) + ((x > b).to(tl.int64) << 16)
        ones += ((x > c).to(tl.int64) << 32) + ((x > d).to(tl.int64) << 48)
        counts = tl.sum(ones)
        above_a = counts & 0xFFFF
        above_b = (counts >> 16) & 0xFFFF
        above_c = (counts >> 32) & 0xFFFF
        above_d = counts >> 48
        if above_a <= MOST:
            high = a
            above = above_a
        elif above_b <= MOST:
            low = a
            high = b
            above = above_b
        elif above_c <= MOST:
            low = b
            high = c
            above = above_c
        elif above_d <= MOST:
            low = c
            high = d
            above = above_d
        else:
            low = d
        passes += 1
    return high


@triton.jit
def store_top(
    keys,  # [TOP] int64, written
    left_out,  # [] fp32, written
    x,
    index,
    best,
    temperature,
    TOP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keeps top tokens of a block, at most ``TOP``, and the highest logit that it leaves out.

    It guesses among the highest logits of groups of tokens, since few of the top tokens share one.
    """
    # Tokens under `lowest` have no weight: they are more than 28 temperatures (LOWEST) below the
    # best. Some fp32 numbers lie between the two, even if the temperature is tiny.
    reach = tl.maximum(temperature * 29.0, tl.abs(best) * 1e-6)
    lowest = best - 0.98 * reach
    groups = tl.max(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1)
    wanted: tl.constexpr = (TOP * 5 + 7) // 8
    threshold = narrow(groups, best - 1.25 * reach, best, lowest, wanted, (TOP * 7 + 7) // 8)
    count = tl.sum((x > threshold).to(tl.int32))
    if count > TOP:
        threshold = narrow(x, threshold, best, lowest, wanted, TOP)
        count = tl.sum((x > threshold).to(tl.int32))
    kept = x > threshold
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(keys + place, key_of(x, index), mask=kept)
    slot = tl.arange(0, TOP)
    tl.store(keys + slot, tl.full([TOP], NO_KEY, tl.int64), mask=slot >= count)
    tl.store(left_out, tl.max(tl.where(kept, float("-inf"), x)))


@triton.jit
def find_highest(
    logits,  # [S, V]
    highest,  # [S, BLOCKS] fp32, written; +inf where a logit is +inf or NaN
    likeliest,  # [S, BLOCKS] int32, written: the first token with the highest logit
    stride,
    vocabulary,
    blocks,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Program (row, block)."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = index < vocabulary
    x = tl.load(logits + number * stride + index, mask=inside, other=float("-inf")).to(tl.float32)
    broken = tl.sum(((x != x) | (x == float("inf"))).to(tl.int32))
    best = tl.max(x)
    place = number * blocks + tl.program_id(1)
    tl.store(highest + place, tl.where(broken > 0, float("inf"), best))
    tl.store(likeliest + place, tl.min(tl.where(x == best, index, NONE)))


@triton.jit
def find_top(
    logits,  # [S, V]
    temperatures,  # [S] fp32
    top_ks,  # [S] int64
    top_ps,  # [S] fp32
    left_out,  # [S, BLOCKS] fp32, written if the row has filters: the highest logit without a key
    keys,  # [S, BLOCKS, TOP] int64, written then: of top tokens in order of index, then NO_KEY
    stride,
    vocabulary,
    blocks,
    TOP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Program (row, block).

    A kernel of its own: within `find_highest` its registers would halve the programs on a
    multiprocessor.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.program_id(0).to(tl.int64)
    filters = has_top_k(tl.load(top_ks + number), vocabulary) | (tl.load(top_ps + number) < 1)
    temperature = tl.load(temperatures + number)
    if filters & (temperature > 0):
        index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = index < vocabulary
        x = tl.load(logits + number * stride + index, mask=inside, other=float("-inf"))
        x = x.to(tl.float32)
        best = tl.max(x)
        place = number * blocks + tl.program_id(1)
        store_top(
            keys + place * TOP, left_out + place, x, index, best, temperature, TOP, GROUP, BLOCK
        )


@triton.jit
def has_top_k(top_k, vocabulary):
    return (top_k > 0) & (top_k < vocabulary)


@triton.jit
def weigh_blocks(
    logits,  # [S, V]
    temperatures,  # [S] fp32
    top_ks,  # [S] int64
    min_ps,  # [S] fp32
    highest,  # [S, BLOCKS] fp32
    weights,  # [S, BLOCKS] int64, written: of the tokens that min_p keeps
    stride,
    vocabulary,
    blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks up to a power of two
    PDL: tl.constexpr = False,
):
    """Program (row, block). Rows that are greedy or have a top_k need no weights."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + number)
    if (temperature > 0) & (has_top_k(tl.load(top_ks + number), vocabulary) == 0):
        block = tl.arange(0, BLOCKS)
        each = tl.load(highest + number * blocks + block, mask=block < blocks, other=float("-inf"))
        row = logits + number * stride
        start = tl.program_id(1) * BLOCK
        x = scaled(row, start, vocabulary, tl.max(each), temperature, BLOCK)
        floor = floor_of(tl.load(min_ps + number))
        weight = tl.sum(tl.where(order_of(x) >= floor, weight_of(x), 0))
        tl.store(weights + number * blocks + tl.program_id(1), weight)


@triton.jit
def draw_rows(
    logits,  # [S, V]
    temperatures,  # [S] fp32
    top_ks,  # [S] int64
    top_ps,  # [S] fp32
    min_ps,  # [S] fp32
    seeds,  # [S] int64
    positions,  # [S] int64
    highest,  # [S, BLOCKS] fp32
    likeliest,  # [S, BLOCKS] int32
    left_out,  # [S, BLOCKS] fp32
    weights,  # [S, BLOCKS] int64
    keys,  # [S, BLOCKS, TOP] int64
    tokens,  # [S] int64, written
    stride,
    vocabulary,
    blocks,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks up to a power of two
    PDL: tl.constexpr = False,
):
    """`rayfin.kernels.sampling.sample`. Program (row); -1 for a row that cannot be sampled."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * stride
    block = tl.arange(0, BLOCKS)
    known = block < blocks
    each = tl.load(highest + number * blocks + block, mask=known, other=float("-inf"))
    best = tl.max(each)
    first = tl.load(likeliest + number * blocks + block, mask=known, other=NONE)
    token = tl.min(tl.where(each == best, first, NONE))
    temperature = tl.load(temperatures + number)
    if (best == float("inf")) | (best == float("-inf")):
        token = tl.full([], -1, tl.int32)
    elif temperature > 0:
        top_k = tl.load(top_ks + number)
        top_p = tl.load(top_ps + number)
        min_p = tl.load(min_ps + number)
        u = uniform_of(tl.load(seeds + number), tl.load(positions + number))
        weight = tl.load(weights + number * blocks + block, mask=known, other=0)
        if has_top_k(top_k, vocabulary) | (top_p < 1):
            left = tl.load(left_out + number * blocks + block, mask=known, other=float("-inf"))
            token = draw_among(
                keys + number * blocks * TOP,
                tl.max(left),
                vocabulary,
                blocks,
                best,
                temperature,
                tl.sum(weight),
                top_k,
                top_p,
                min_p,
                u,
                TOP,
                BLOCKS,
            )
            if token < 0:
                token = draw(row, vocabulary, best, temperature, top_k, top_p, min_p, u, BLOCK)
        else:
            target = (u * tl.sum(weight).to(tl.float64)).to(tl.int64)
            sums = tl.cumsum(weight, 0)
            chosen = tl.minimum(tl.sum((sums <= target).to(tl.int32)), blocks - 1)
            before = tl.sum(tl.where(block == chosen, sums - weight, 0))
            start = chosen * BLOCK
            x = scaled(row, start, vocabulary, best, temperature, BLOCK)
            inner = tl.where(order_of(x) >= floor_of(min_p), weight_of(x), 0)
            index = start + tl.arange(0, BLOCK)
            hit = (before + tl.cumsum(inner, 0) > target) & (index < vocabulary)
            token = tl.min(tl.where(hit, index, vocabulary - 1))
    tl.store(tokens + number, token.to(tl.int64))


@triton.jit
def search_among(order, amount, floor, needed):
    """`search` among the tokens of one tensor."""
    low = floor
    high = tl.full([], 1, tl.int32)
    while high - low > 1:
        middle = low + (high - low) // 2
        above = tl.sum(tl.where(order >= middle, amount, 0))
        enough = above.to(tl.float64) >= needed
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def filtered_order(key, highest, temperature):
    """Orders of the scaled logits of keys; the lowest one where there is no key."""
    x = (value_of((key >> 32).to(tl.int32)) - highest) / temperature
    return tl.where(key == NO_KEY, LOWEST_ORDER, order_of(x))


@triton.jit
def weight_at(order):
    """`weight_of` the logits of `filtered_order`."""
    return weight_of(tl.where(order == LOWEST_ORDER, 2.0 * LOWEST, value_of(order)))


@triton.jit
def draw_among(
    keys,  # [BLOCKS, TOP] int64
    left_out,  # [] fp32, the highest logit that has no key
    vocabulary,
    blocks,
    highest,
    temperature,
    total,  # weight of all tokens that min_p keeps, without a top_k
    top_k,
    top_p,
    min_p,
    u,
    TOP: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """`draw` from the top tokens of each block; -1 if these may not be all that are kept.

    They are all if the threshold is above the highest logit that has no key. With a top_k it is
    top_k's threshold, since top_p keeps a part of the weight above that.
    """
    block = tl.arange(0, BLOCKS)
    place = tl.arange(0, TOP)
    at = (block * TOP)[:, None] + place[None, :]
    order2d = filtered_order(
        tl.load(keys + at, mask=(block < blocks)[:, None], other=NO_KEY), highest, temperature
    )
    last = order_of((left_out - highest) / temperature)
    order = tl.reshape(order2d, [BLOCKS * TOP])
    amount = weight_at(order)
    floor = floor_of(min_p)
    if has_top_k(top_k, vocabulary):
        one = tl.full([BLOCKS * TOP], 1, tl.int64)
        floor = search_among(order, one, floor, top_k.to(tl.float64))
        total = tl.sum(tl.where(order >= floor, amount, 0))
    equals = tl.zeros([], tl.int64)
    floor_weight = tl.zeros([], tl.int64)
    covered = floor > last
    if top_p < 1:
        needed = total.to(tl.float64) * top_p.to(tl.float64)
        floor = search_among(order, amount, floor, needed)
        covered = covered | ((floor > last) & (has_top_k(top_k, vocabulary) == 0))
        floor_weight = weight_of(value_of(floor))
        above = tl.sum(tl.where(order > floor, amount, 0))
        count = tl.sum((order == floor).to(tl.int64))
        missing = needed - above.to(tl.float64)
        equals = tl.ceil(missing / tl.maximum(floor_weight, 1).to(tl.float64)).to(tl.int64)
        equals = tl.minimum(tl.maximum(equals, (above == 0).to(tl.int64)), count)
        total = above + equals * floor_weight
    else:
        floor -= 1
    token = tl.full([], -1, tl.int32)
    if covered:
        target = (u * total.to(tl.float64)).to(tl.int64)
        amount2d = tl.reshape(amount, [BLOCKS, TOP])
        here = tl.sum((order2d == floor).to(tl.int64), 1)
        seen = tl.cumsum(here, 0) - here
        kept = tl.minimum(tl.maximum(equals - seen, 0), here)
        weight = tl.sum(tl.where(order2d > floor, amount2d, 0), 1) + kept * floor_weight
        sums = tl.cumsum(weight, 0)
        chosen = tl.minimum(tl.sum((sums <= target).to(tl.int32)), blocks - 1)
        before = tl.sum(tl.where(block == chosen, sums - weight, 0))
        seen_before = tl.sum(tl.where(block == chosen, seen, 0))
        key = tl.load(keys + chosen * TOP + place)
        index = ((key & LOW_BITS) ^ LOW_BITS).to(tl.int32)
        inner = filtered_order(key, highest, temperature)
        at_floor = inner == floor
        kept_here = at_floor & (seen_before + tl.cumsum(at_floor.to(tl.int64), 0) <= equals)
        inner_weight = tl.where((inner > floor) | kept_here, weight_at(inner), 0)
        hit = (before + tl.cumsum(inner_weight, 0) > target) & (inner != LOWEST_ORDER)
        token = tl.min(tl.where(hit, index, vocabulary - 1))
    return token


@triton.jit
def draw(row, vocabulary, highest, temperature, top_k, top_p, min_p, u, BLOCK: tl.constexpr):
    """The token of a number in [0, 1): inverse of the cumulative weights in vocabulary order."""
    # Keeps the tokens above `floor`, and the first `equals` of those at it.
    floor = floor_of(min_p)
    if has_top_k(top_k, vocabulary):
        floor = search(
            row, vocabulary, highest, temperature, floor, top_k.to(tl.float64), False, BLOCK
        )
    total = tl.zeros([], tl.int64)
    for start in range(0, vocabulary, BLOCK):
        x = scaled(row, start, vocabulary, highest, temperature, BLOCK)
        total += tl.sum(tl.where(order_of(x) >= floor, weight_of(x), 0))
    equals = tl.zeros([], tl.int64)
    floor_weight = tl.zeros([], tl.int64)  # weight of a token at the floor
    if top_p < 1:
        needed = total.to(tl.float64) * top_p.to(tl.float64)
        floor = search(row, vocabulary, highest, temperature, floor, needed, True, BLOCK)
        floor_weight = weight_of(value_of(floor))
        above = tl.zeros([], tl.int64)
        count = tl.zeros([], tl.int64)
        for start in range(0, vocabulary, BLOCK):
            x = scaled(row, start, vocabulary, highest, temperature, BLOCK)
            order = order_of(x)
            above += tl.sum(tl.where(order > floor, weight_of(x), 0))
            count += tl.sum((order == floor).to(tl.int64))
        missing = needed - above.to(tl.float64)
        equals = tl.ceil(missing / tl.maximum(floor_weight, 1).to(tl.float64)).to(tl.int64)
        equals = tl.minimum(tl.maximum(equals, (above == 0).to(tl.int64)), count)
        total = above + equals * floor_weight
    else:
        floor -= 1  # tokens at the floor are above it now

    target = (u * total.to(tl.float64)).to(tl.int64)
    before = tl.zeros([], tl.int64)  # weight of the blocks so far
    seen = tl.zeros([], tl.int64)  # tokens at the floor in them
    block_start = tl.full([], -1, tl.int32)
    # Not `before` and `seen`: Triton 3.6 takes two names of one value for one variable of the loop.
    block_before = tl.zeros([], tl.int64)
    block_seen = tl.zeros([], tl.int64)
    for start in range(0, vocabulary, BLOCK):
        x = scaled(row, start, vocabulary, highest, temperature, BLOCK)
        order = order_of(x)
        here = tl.sum((order == floor).to(tl.int64))
        kept = tl.minimum(tl.maximum(equals - seen, 0), here)
        weight = tl.sum(tl.where(order > floor, weight_of(x), 0)) + kept * floor_weight
        if (block_start < 0) & (before + weight > target):
            block_start = start
            block_before = before
            block_seen = seen
        before += weight
        seen += here
    start = tl.maximum(block_start, 0)
    x = scaled(row, start, vocabulary, highest, temperature, BLOCK)
    order = order_of(x)
    at_floor = order == floor
    kept = at_floor & (block_seen + tl.cumsum(at_floor.to(tl.int64), 0) <= equals)
    weights = tl.where((order > floor) | kept, weight_of(x), 0)
    index = start + tl.arange(0, BLOCK)
    hit = block_before + tl.cumsum(weights, 0) > target
    return tl.min(tl.where(hit & (index < vocabulary), index, vocabulary - 1))
