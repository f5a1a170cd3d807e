"""What may hold back the next waiting request, beside missing slots and pages."""

from typing import Protocol

from rayfin.actors.scheduler.request import Request


class AdmissionGate(Protocol):
    """One reason to hold a request back. ``Engine`` lists the gates; all must admit.

    A request that is held back stays at the head of its queue, in front of all others, until the
    gate admits it. A gate must not hold back a request while nothing runs, unless its owner runs
    the request otherwise, as ``Quarantine`` does.
    """

    def may_admit(self, request: Request) -> bool:
        """Whether the waiting request may run beside those that run now."""
        ...
