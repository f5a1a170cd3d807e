"""Pages for one more token of every decoding request, by preemption if pages have run out."""

import numpy as np

from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.lifecycle import Lifecycle


def make_room(lifecycle: Lifecycle, slots: Int64Array) -> tuple[Int64Array, bool]:
    """Grows the page tables of the decoding ``slots`` [N] by a token each.

    If pages run out, the last request in order (``Lifecycle.victim``) is preempted, possibly the
    one that needs the page. Only rows that cross a page boundary are visited one by one.

    Returns:
        The slots [M <= N] that can decode now, and whether a request was preempted.
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
