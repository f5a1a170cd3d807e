"""Chooses the experts of each row, by the logits of a mixture's router."""

import triton
import triton.language as tl


@triton.jit
def choose_experts(
    logits,  # [T, E]
    correction,  # [E], added to scores for the choice alone; any pointer without CORRECTED
    chosen,  # [T, K] int64, written: highest first, the lower id of equal ones
    shares,  # [T, K], written
    scale,
    CORRECTED: tl.constexpr,
    SIGMOID: tl.constexpr,  # scores; else a softmax
    NORMED: tl.constexpr,  # shares sum to ``scale``
    PAIRS: tl.constexpr,  # a group is as good as its two best experts; else as its best one
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,  # K
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,  # groups whose experts may be chosen
    GROUPS_WIDTH: tl.constexpr,  # powers of two over GROUPS, experts of a group, and K
    WIDTH: tl.constexpr,
    CHOICES_WIDTH: tl.constexpr,
):
    """Program (row): scores, then one choice after the other."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, GROUPS_WIDTH * WIDTH)
    expert = place // WIDTH * (EXPERTS // GROUPS) + place % WIDTH
    exists = (place // WIDTH < GROUPS) & (place % WIDTH < EXPERTS // GROUPS)
    value = tl.load(logits + row * EXPERTS + expert, mask=exists, other=-float("inf"))
    value = value.to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        score = tl.exp(value - tl.max(value, 0))
        score = score / tl.sum(score, 0)
    rank = score
    if CORRECTED:
        rank += tl.load(correction + expert, mask=exists, other=0.0).to(tl.float32)
    rank = tl.where(exists, rank, -float("inf"))

    if KEPT < GROUPS:
        groups = tl.reshape(rank, [GROUPS_WIDTH, WIDTH])
        best = tl.max(groups, 1)
        if PAIRS:
            others = tl.arange(0, WIDTH)[None, :] != tl.argmax(groups, 1)[:, None]
            best += tl.max(tl.where(others, groups, -float("inf")), 1)
        group = tl.arange(0, GROUPS_WIDTH)
        kept = group < 0
        for _ in range(KEPT):
            first = tl.argmax(best, 0)
            kept |= group == first
            best = tl.where(group == first, -float("inf"), best)
        groups = tl.where(kept[:, None], groups, -float("inf"))
        rank = tl.reshape(groups, [GROUPS_WIDTH * WIDTH])

    choice = tl.arange(0, CHOICES_WIDTH)
    ids = tl.zeros([CHOICES_WIDTH], tl.int64)
    share = tl.zeros([CHOICES_WIDTH], tl.float32)
    for number in range(CHOICES):
        at = tl.argmax(rank, 0)
        ids = tl.where(choice == number, tl.sum(tl.where(place == at, expert, 0), 0), ids)
        share = tl.where(choice == number, tl.sum(tl.where(place == at, score, 0.0), 0), share)
        rank = tl.where(place == at, -float("inf"), rank)
    if NORMED:
        share = share / tl.sum(share, 0)
    written = choice < CHOICES
    tl.store(chosen + row * CHOICES + choice, ids, mask=written)
    share = (share * scale).to(shares.dtype.element_ty)
    tl.store(shares + row * CHOICES + choice, share, mask=written)
