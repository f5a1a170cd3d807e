"""At most so many LoRA adapters run at once: those that one step can have."""

from rayfin.actors.scheduler.state.request import Request
from rayfin.actors.scheduler.state.running_table import RunningTable


class AdapterGate:
    """An ``AdmissionGate``. A request with an adapter that runs already always passes, and so does
    one of the base model."""

    def __init__(self, running: RunningTable, most: int) -> None:
        self._running = running
        self._most = most

    def may_admit(self, request: Request) -> bool:
        """Whether the request's adapter runs, or one more may."""
        adapter = request.source.adapter
        if adapter is None:
            return True
        digests = {
            other.source.adapter.digest
            for other in self._running.holders()
            if other.source.adapter is not None
        }
        return adapter.digest in digests or len(digests) < self._most
