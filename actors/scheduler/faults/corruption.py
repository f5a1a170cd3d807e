"""Finds requests that have read pages which a failed row should have written.

Pages are shared as soon as the chunk that fills them is scheduled (``take_chunk``): in the same
step, or in the next one, which is in flight already. If that chunk's row fails, its pages are not
valid, and all that was computed from them must be computed again.
"""

from collections.abc import Callable

from rayfin.actors.messages import StepResult
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.scheduler_state import SchedulerState
from rayfin.actors.scheduler.step_builder import StepRecord


def requests_sharing_failed_pages(
    state: SchedulerState, record: StepRecord, result: StepResult, forget: Callable[[], None]
) -> list[Request]:
    """Returns running requests that share pages of failed rows, without the failed ones themselves.

    If a failed chunk's request has left its slot, its pages are not known any more. Then ``forget``
    is called, for they may be in the prefix index, and all running requests are returned, once
    for all rows of that time: requests admitted since share none of those pages. Decoding rows
    share only pages whose tokens were returned, so those were written.
    """
    running, tables = state.running, state.tables
    failed: dict[Request, None] = {}
    bad: set[int] = set()
    for row in sorted(result.errors):
        slot = int(record.slots[row])
        if running.admission[slot] != record.admissions[row]:
            requeued = record.admissions[row] <= state.requeued_admission
            if record.info.is_decoding[row] or requeued:
                continue
            state.requeued_admission = running.last_admission
            forget()
            return running.holders()
        first = int(record.info.kv_len[row]) // tables.page_size
        if running.request(slot) not in failed and bad.isdisjoint(tables.pages_since(slot, 0)):
            failed[running.request(slot)] = None
        bad.update(tables.pages_since(slot, first))
    affected: dict[Request, None] = {}
    others = [request for request in running.holders() if request not in failed]
    grown = True
    while grown:
        grown = False
        for request in others:
            if request not in affected and _reads(state, request, bad, failed | affected):
                affected[request] = None
                grown = True
    return list(affected)


def _reads(
    state: SchedulerState, request: Request, bad: set[int], failed: dict[Request, None]
) -> bool:
    """Whether the request shares or copied a bad page; adds its pages from there on to ``bad``."""
    if request.fork_parent in failed:
        bad.update(page for slot in request.slots for page in state.tables.pages_since(slot, 0))
        return True
    for slot in request.slots:
        pages = state.tables.pages_since(slot, 0)
        first = next((index for index, page in enumerate(pages) if page in bad), None)
        if first is not None:
            bad.update(pages[first:])
            return True
    return False
