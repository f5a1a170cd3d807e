"""What may hold back the next waiting request, beside missing slots and pages."""

from typing import Protocol

from rayfin.actors.scheduler.state.request import Request


class AdmissionGate(Protocol):
    """One reason to hold a request back. ``Engine`` lists the gates; all must admit.

    A request that is held back stays at the head of its queue and holds back those behind it. A
    gate must therefore admit it in the end: at the latest when nothing else runs.
    """

    def may_admit(self, request: Request) -> bool:
        """Whether the waiting request may run beside those that run now."""
        ...
