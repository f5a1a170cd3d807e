"""Room for one more token of every decoding request, by preemption where pages have run out."""

import numpy as np

from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.core.lifecycle import Lifecycle


def make_room(lifecycle: Lifecycle, slots: Int64Array) -> tuple[Int64Array, bool]:
    """Grows the page tables of the decoding ``slots`` [N] by a token each.

    Out of pages, the lowest request (``Lifecycle.victim``) gives up its own, possibly the one that
    asks. Only the rows that cross a page boundary are looked at one by one.

    Returns:
        The slots [M <= N] that can decode now, and whether anything was preempted.
    """
    running, tables = lifecycle.state.running, lifecycle.state.tables
    full = running.num_computed[slots] >= tables.held[slots].astype(np.int64) * tables.page_size
    crossing = slots[full]
    if tables.append_pages(crossing):
        return slots, False
    preempted = False
    for slot in crossing.tolist():
        while running.admission[slot] and not tables.grow(
            slot, int(running.num_computed[slot]) + 1
        ):
            lifecycle.preempt(lifecycle.victim())
            preempted = True
    if preempted:
        slots = slots[running.admission[slots] > 0]
    return slots, preempted
