"""Fair shares among tenants: the Virtual Token Counter.

Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI'24 (arXiv:2401.00588). Each
tenant has a counter of the tokens that it was served, divided by its weight: prompt tokens count
when a request is admitted, output tokens when they are sampled. The next request is the first of
the waiting tenant with the least counter. A tenant that begins to wait is lifted to the least
counter among those that wait, so idling earns no credit.

Beyond the paper, requests may be preempted: the latest one of the tenant that was served most. It
waits again at the front of its tenant's queue, and its prompt is not charged a second time. A beam
search is charged one output token for each of its rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from rayfin.actors.messages import Int64Array
from rayfin.actors.scheduler.queues.lazy_heap import LazyHeap
from rayfin.actors.scheduler.request import Request

PROMPT_WEIGHT, CACHED_WEIGHT, OUTPUT_WEIGHT = 1.0, 0.1, 2.0
"""Cost of a token, as in the paper, which follows what providers charge: a tenth for a token of the
prompt that was cached."""

MAX_IDLE = 10_000
"""Most tenants without requests that are remembered because they are ahead of others."""

NO_ROW = -1


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant that has requests, or had some and is still ahead of the others."""

    name: str
    weight: float
    counter: float = 0.0  # without the output tokens that ``FairQueue._served`` still holds
    waiting: LazyHeap[Request] = field(default_factory=LazyHeap)
    running: int = 0  # requests that hold slots
    row: int = NO_ROW  # in ``FairQueue._served``, while a request runs


class FairQueue:
    """Per-tenant queues in order of arrival, and the counters that choose between them.

    A step costs a ``bincount`` over its rows, and O(log n) for each tenant at the top of the heap
    whose counter has grown. Counters of waiting tenants never fall, so an outdated entry is too low
    and is corrected when it reaches the top.

    Args:
        num_slots: requests that can run at once.
        weights: shares of tenants by name; a tenant not named has 1.
    """

    def __init__(self, num_slots: int, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._tenants: dict[str, _Tenant] = {}
        self._backlogged: LazyHeap[_Tenant] = LazyHeap()  # by counter, may be outdated, too low
        self._idle: LazyHeap[_Tenant] = LazyHeap()  # by counter, exactly
        self._last: _Tenant | None = None  # the last that waited
        self._waiting = 0
        self._row_of_slot: Int64Array = np.zeros(num_slots, np.int64)
        self._served: Int64Array = np.zeros(num_slots, np.int64)  # output tokens, by row
        self._free_rows = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return self._waiting

    @property
    def num_tenants(self) -> int:
        """Tenants remembered."""
        return len(self._tenants)

    def counter(self, name: str) -> float:
        """Weighted tokens that the tenant was served, lifts included; 0 if it is unknown."""
        tenant = self._tenants.get(name)
        return self._counter(tenant) if tenant else 0.0

    def push(self, request: Request) -> None:
        name = request.source.tenant
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self._weights.get(name, 1.0))
        self._idle.discard(tenant)
        if not tenant.waiting:
            floor = self._floor()
            tenant.counter += max(0.0, floor - self._counter(tenant))
            self._backlogged.push(self._counter(tenant), tenant)
            self._forget_idle(floor)
        tenant.waiting.push(request.order, request)
        self._waiting += 1

    def peek(self) -> Request | None:
        tenant = self._next_tenant()
        first = tenant.waiting.first() if tenant else None
        return first[1] if first else None

    def pop(self) -> Request:
        tenant = self._next_tenant()
        if tenant is None:
            raise IndexError("no request waits")
        request = tenant.waiting.pop()
        self._removed(tenant)
        return request

    def entered(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        if not tenant.running:
            tenant.row = self._free_rows.pop()
        tenant.running += 1
        if not request.admitted:
            prompt, cached = len(request.source.prompt), request.cached_tokens
            cost = PROMPT_WEIGHT * (prompt - cached) + CACHED_WEIGHT * cached
            tenant.counter += cost / tenant.weight
        self._row_of_slot[request.slots] = tenant.row

    def discard(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.waiting.discard(request)
        self._removed(tenant)
        self._retire(tenant)

    def sampled(self, slots: Int64Array) -> None:
        self._served += np.bincount(self._row_of_slot[slots], minlength=len(self._served))

    def left(self, request: Request) -> None:
        tenant = self._tenants[request.source.tenant]
        tenant.running -= 1
        if not tenant.running:
            tenant.counter = self._counter(tenant)
            self._served[tenant.row] = 0
            self._free_rows.append(tenant.row)
            tenant.row = NO_ROW
            self._retire(tenant)

    def victim(self, running: Iterable[Request]) -> Request:
        """The latest request of the tenant that was served most."""
        return max(
            running, key=lambda request: (self.counter(request.source.tenant), request.order)
        )

    def _counter(self, tenant: _Tenant) -> float:
        if tenant.row == NO_ROW:
            return tenant.counter
        return tenant.counter + OUTPUT_WEIGHT * float(self._served[tenant.row]) / tenant.weight

    def _next_tenant(self) -> _Tenant | None:
        while (first := self._backlogged.first()) is not None:
            key, tenant = first
            counter = self._counter(tenant)
            if counter == key:
                return tenant
            self._backlogged.push(counter, tenant)
        return None

    def _floor(self) -> float:
        """The counter to which a tenant is lifted that begins to wait."""
        tenant = self._next_tenant() or self._last
        return self._counter(tenant) if tenant else 0.0

    def _removed(self, tenant: _Tenant) -> None:
        self._waiting -= 1
        if not tenant.waiting:
            self._backlogged.discard(tenant)
            self._last = tenant

    def _retire(self, tenant: _Tenant) -> None:
        """Moves a tenant without requests to the idle ones."""
        if not tenant.running and not tenant.waiting:
            self._idle.push(tenant.counter, tenant)
            self._forget_idle(self._floor())

    def _forget_idle(self, floor: float) -> None:
        """Drops idle tenants that a lift would bring to ``floor``; if too many, the least ahead."""
        while (first := self._idle.first()) is not None:
            counter, tenant = first
            if counter > floor and len(self._idle) <= MAX_IDLE:
                return
            self._idle.pop()
            del self._tenants[tenant.name]
