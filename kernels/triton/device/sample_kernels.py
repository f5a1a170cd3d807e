"""Samples one token per row without a sort, by a search for thresholds.

Top-k and top-p keep the tokens above some logit. A search finds it by counting the tokens, or
summing the probability, above several guesses (the pivots of FlashInfer's sampling, 2025). Integer
weights and exact comparisons keep exactly the tokens that `rayfin.kernels.sampling` keeps.

The draw inverts the distribution function at the hash of (seed, position). Like Gumbel noise from
both it depends on nothing else in the batch, and it is the draw of the CPU.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-28.0)  # exp(-28) * 2**40 < 1: smaller logits have no weight
NONE = tl.constexpr(2147483647)


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
def sample_rows(
    logits,  # [S, V]
    temperatures,  # [S] fp32
    top_ks,  # [S] int64
    top_ps,  # [S] fp32
    min_ps,  # [S] fp32
    seeds,  # [S] int64
    positions,  # [S] int64
    tokens,  # [S] int64, written
    stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """`rayfin.kernels.sampling.sample`. Program (row); -1 for a row that cannot be sampled."""
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * stride
    highest = tl.full([], float("-inf"), tl.float32)
    likeliest = tl.full([], 0, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(row + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
        broken += tl.sum(((x != x) | (x == float("inf"))).to(tl.int32))
        best = tl.max(x)
        if best > highest:
            highest = best
            likeliest = tl.min(tl.where(x == best, index, NONE))
    temperature = tl.load(temperatures + number)
    token = likeliest
    if (broken > 0) | (highest == float("-inf")):
        token = tl.full([], -1, tl.int32)
    elif temperature > 0:
        token = draw(
            row,
            vocabulary,
            highest,
            temperature,
            tl.load(top_ks + number),
            tl.load(top_ps + number),
            tl.load(min_ps + number),
            uniform_of(tl.load(seeds + number), tl.load(positions + number)),
            BLOCK,
        )
    tl.store(tokens + number, token.to(tl.int64))


@triton.jit
def draw(row, vocabulary, highest, temperature, top_k, top_p, min_p, u, BLOCK: tl.constexpr):
    """The token of a number in [0, 1): inverse of the cumulative weights in vocabulary order."""
    # Keeps the tokens above `floor`, and the first `equals` of those at it.
    lowest = tl.full([], LOWEST, tl.float32)
    floor = order_of(tl.maximum(tl.log(tl.maximum(min_p, 1e-13)), lowest))
    if (top_k > 0) & (top_k < vocabulary):
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
    block_before = before
    block_seen = seen
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
