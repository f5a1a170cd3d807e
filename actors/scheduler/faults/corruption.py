"""Who has read what a failed row was to write.

Pages are shared from the moment in which the chunk that fills them is scheduled (``take_chunk``):
in the same step, or in the next one, which is in flight already. When that chunk's row fails, its
pages hold nothing good, and whatever was computed on top of them must be computed again.
"""

from rayfin.actors.messages import StepResult
from rayfin.actors.scheduler.core.scheduler_state import SchedulerState
from rayfin.actors.scheduler.core.step_builder import StepRecord
from rayfin.actors.scheduler.state.request import Request


def requests_sharing_failed_pages(
    state: SchedulerState, record: StepRecord, result: StepResult
) -> list[Request]:
    """Running requests, those whose rows failed first left out, that stand on pages of such a row.

    All that run, where a request is gone from the row whose chunk failed: nobody knows its pages
    any more. Once for all rows of its time: those admitted since stand on nothing of theirs. (What
    decodes shares only pages whose tokens have come back, so those were written.)
    """
    running, tables = state.running, state.tables
    culprits: dict[Request, None] = {}
    bad: set[int] = set()
    for row in sorted(result.errors):
        slot = int(record.slots[row])
        if running.admission[slot] != record.admissions[row]:
            dealt_with = record.admissions[row] <= state.requeued_admission
            if record.info.is_decoding[row] or dealt_with:
                continue
            state.requeued_admission = running.last_admission
            return running.holders()
        first = int(record.info.kv_len[row]) // tables.page_size
        own = tables.pages_since(slot, first)
        if running.request(slot) not in culprits and bad.isdisjoint(tables.pages_since(slot, 0)):
            culprits[running.request(slot)] = None
        bad.update(own)
    found: dict[Request, None] = {}
    others = [request for request in running.holders() if request not in culprits]
    grown = True
    while grown:
        grown = False
        for request in others:
            if request not in found and _stands_on(state, request, bad, culprits | found):
                found[request] = None
                grown = True
    return list(found)


def _stands_on(
    state: SchedulerState, request: Request, bad: set[int], culprits: dict[Request, None]
) -> bool:
    """Whether the request shares a bad page, or has a copy of one; its own are bad from there."""
    if request.fork_parent in culprits:
        bad.update(page for slot in request.slots for page in state.tables.pages_since(slot, 0))
        return True
    for slot in request.slots:
        pages = state.tables.pages_since(slot, 0)
        first = next((index for index, page in enumerate(pages) if page in bad), None)
        if first is not None:
            bad.update(pages[first:])
            return True
    return False
