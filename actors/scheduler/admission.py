"""Whether a waiting request may run now: room for it, and what else may hold it back."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rayfin.actors.parts import PartFacts, first_of
from rayfin.actors.plugins import contained, plugins, set_up_plugins
from rayfin.actors.scheduler.cached_prefix import CachedPrefix, PrefixLookup
from rayfin.actors.scheduler.preempted_pages import PreemptionPolicy
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.running_table import RunningTable
from rayfin.actors.scheduler.scheduler_state import SchedulerState


class AdmissionGate(Protocol):
    """One reason to hold a request back. ``Engine`` lists the gates; all must admit.

    A request that is held back stays at the head of its queue, in front of all others, until the
    gate admits it. A gate must not hold back a request while nothing runs, unless its owner runs
    the request otherwise, as ``Quarantine`` does.
    """

    def may_admit(self, request: Request) -> bool:
        """Returns whether the waiting request may run beside those that run now."""
        ...


class Admission:
    """Answers by the state as it is; ``Lifecycle.admit`` changes it."""

    def __init__(self, state: SchedulerState, preemption: PreemptionPolicy) -> None:
        self.gates: list[AdmissionGate] = []
        self.prefixes = PrefixLookup(state)
        self.returning: set[Request] = set()
        """Requests that ran when the runners died, and still read their pages."""
        self._state = state
        self._preemption = preemption

    def can_admit(self, request: Request, spare: int) -> bool:
        """Returns whether all gates admit the request, and there is room for it."""
        return self.passes_gates(request) and self.has_room(request, spare)

    def passes_gates(self, request: Request) -> bool:
        """Returns whether all gates admit the request, and it overtakes none whose runner died."""
        return all(gate.may_admit(request) for gate in self.gates) and not self.overtakes(request)

    def overtakes(self, request: Request) -> bool:
        """Returns whether requests that ran when the runners died still read their pages."""
        return any(
            other.order < request.order and other.source.background <= request.source.background
            for other in self.returning
        )

    def has_room(self, request: Request, spare: int) -> bool:
        """Returns whether there are slots, and pages for the tokens and one more per beam.

        ``spare`` pages must remain free. False while its fork parent computes their prompt.
        """
        prefix = self.prefixes.find(request)
        return prefix is not None and self._fits(request, prefix, spare)

    def lacks_room(self, request: Request) -> bool:
        """Returns whether slots or pages are all that the request waits for."""
        prefix = self.prefixes.find(request)
        return prefix is not None and not self._fits(request, prefix, 0)

    def _fits(self, request: Request, prefix: CachedPrefix, spare: int) -> bool:
        if self._state.running.num_free_slots < request.width:
            return False
        more = 1 if request.source.samples else 0
        tokens, beams = request.num_tokens + more, request.width - 1
        return self._state.tables.fits(tokens, prefix.pages, beams, spare)

    def num_to_compute(self, request: Request) -> int:
        """Tokens of the waiting request that are neither cached nor in host memory."""
        prefix = self.prefixes.find(request)
        cached = 0 if prefix is None else prefix.num_tokens
        return request.num_tokens - max(cached, self._preemption.num_saved(request))


class PartGate:
    """An ``AdmissionGate``. A request always passes whose parts run already, or are not limited.

    Adapters are: a step computes with ``max_loras`` at most.
    """

    def __init__(self, running: RunningTable, served: Iterable[PartFacts]) -> None:
        self._running = running
        self._limits = [(facts.of, facts.at_once) for facts in served if facts.at_once is not None]

    def may_admit(self, request: Request) -> bool:
        """Returns whether its parts run, or one more of their kind may."""
        if not request.source.parts:
            return True
        for kind, at_once in self._limits:
            part = first_of(request.source.parts, kind)
            if part is None:
                continue
            others = (other.source.part(kind) for other in self._running.holders())
            keys = {other.key for other in others if other is not None}
            if part.key not in keys and len(keys) >= at_once:
                return False
        return True


class OwnGate:
    """An ``AdmissionGate`` of a user's own, which holds nothing back while nothing runs."""

    def __init__(self, inner: Any, running: RunningTable) -> None:
        self._inner = inner
        self._running = running

    def may_admit(self, request: Request) -> bool:
        """Returns what it says of the request, or that it may run."""
        return not len(self._running) or bool(self._inner.may_admit(request.source))


def own_gates(
    names: Sequence[str], running: RunningTable, spent: Counter[str]
) -> list[AdmissionGate]:
    """Returns the gates of ``--plugin``, which add their seconds to ``spent``.

    Raises:
        InvalidConfig: one cannot be loaded.
    """
    set_up_plugins(tuple(names))
    gates = [contained(gate, "gate", spent, True) for gate in plugins(names, "gate")]
    return [OwnGate(gate, running) for gate in gates]
