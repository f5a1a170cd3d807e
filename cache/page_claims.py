"""Pages of the prefix index that somebody wants to have again, beside those that tables hold.

A claim is a weight, not a lock: a free page that is claimed is allocated after all others, and only
once the claim that is worth least has ended *whole*. Half of a context saves little: the rest has
to be computed in front of it. Who claims is any object; *pins* are claims of tenants with an end.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

TENANT_SHARE = 4
"""A tenant pins at most one page in so many."""

ENDED_PINS = 64
"""So many, beyond as many as there are, wait for a time that no longer counts."""


class PageClaims:
    """The claimants of each page, and the pages of each claimant in their order."""

    def __init__(self) -> None:
        self._claimants: dict[int, tuple[Hashable, ...]] = {}
        self._pages: dict[Hashable, dict[int, None]] = {}
        self._alone: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._claimants)

    def __contains__(self, page: int) -> bool:
        return page in self._claimants

    @property
    def claimants(self) -> list[Hashable]:
        """All that claim something."""
        return list(self._pages)

    def among(self, pages: Sequence[int]) -> list[int]:
        """Those of ``pages`` that are claimed."""
        return [page for page in pages if page in self._claimants]

    def pages(self, claimant: Hashable) -> list[int]:
        """The pages that it claims."""
        return list(self._pages.get(claimant, ()))

    def count(self, claimant: Hashable) -> int:
        """How many pages it claims."""
        return len(self._pages.get(claimant, ()))

    def last(self, claimant: Hashable) -> int | None:
        """The last page that it claims."""
        return next(reversed(self._pages.get(claimant, {})), None)

    def num_alone(self, claimant: Hashable) -> int:
        """How many of them no other claims."""
        return self._alone.get(claimant, 0)

    def claim(self, claimant: Hashable, pages: Sequence[int]) -> list[int]:
        """Claims ``pages`` instead of what it claimed; returns pages without a claim now."""
        before, after = self._pages.get(claimant, {}), dict.fromkeys(pages)
        lost = [page for page in before if page not in after and self._remove(claimant, page)]
        self._add(claimant, [page for page in after if page not in before])
        if after:
            self._pages[claimant] = after
        else:
            self._pages.pop(claimant, None)
            self._alone.pop(claimant, None)
        return lost

    def extend(self, claimant: Hashable, pages: Sequence[int]) -> None:
        """Claims ``pages`` behind those that it claims."""
        self._add(claimant, pages)
        self._pages.setdefault(claimant, {}).update(dict.fromkeys(pages))

    def end(self, claimant: Hashable) -> list[int]:
        """Ends its claim; returns pages without a claim now."""
        return self.claim(claimant, ())

    def drop(self, page: int) -> None:
        """The page leaves the index, and all claims on it end."""
        for claimant in self._claimants.get(page, ()):
            self._remove(claimant, page)
            pages = self._pages[claimant]
            del pages[page]
            if not pages:
                del self._pages[claimant], self._alone[claimant]

    def clear(self) -> list[int]:
        """Ends all claims; returns the pages."""
        pages = list(self._claimants)
        for book in (self._claimants, self._pages, self._alone):
            book.clear()
        return pages

    def _add(self, claimant: Hashable, pages: Sequence[int]) -> None:
        claimants, alone = self._claimants, self._alone
        alone.setdefault(claimant, 0)
        its = (claimant,)  # one object for all pages that it alone claims
        for page in pages:
            if page not in claimants:
                claimants[page] = its
                alone[claimant] += 1
                continue
            others = claimants[page]
            claimants[page] = (*others, claimant)
            if len(others) == 1:
                alone[others[0]] -= 1

    def _remove(self, claimant: Hashable, page: int) -> bool:
        """Returns whether the page has no claim now."""
        others = tuple(other for other in self._claimants[page] if other != claimant)
        if not others:
            del self._claimants[page]
            self._alone[claimant] -= 1
            return True
        self._claimants[page] = others
        if len(others) == 1:
            self._alone[others[0]] += 1
        return False


@dataclass(slots=True, eq=False)
class _Pin:
    """A claim of a tenant, until a time in seconds of the caller's clock."""

    tenant: str
    until: float


class PrefixPins:
    """Pins in ``claims``. A tenant's oldest ones end where a new one would be over its share."""

    def __init__(self, claims: PageClaims, num_pages: int) -> None:
        self._claims = claims
        self._most = max(1, num_pages // TENANT_SHARE)  # pages of each tenant
        self._of: dict[str, dict[_Pin, None]] = {}  # the oldest first
        self._due: list[tuple[float, int, _Pin]] = []  # a heap: (until, number, pin)
        self._number = 0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def pin(self, tenant: str, pages: Sequence[int], until: float) -> list[int]:
        """Pins the first of ``pages``; returns pages without a claim now."""
        pages, lost = list(pages)[: self._most], list[int]()
        room = self._most - len(pages)
        newest_first = list(reversed(self._of.get(tenant, {})))
        its = {pin: self._claims.pages(pin) for pin in newest_first}
        if any(pin.until >= until and its[pin][: len(pages)] == pages for pin in newest_first):
            return lost  # another request wants all of it for as long
        for pin in newest_first:
            covered = pin.until <= until and pages[: len(its[pin])] == its[pin]
            if its[pin] and not covered and len(its[pin]) <= room:
                room -= len(its[pin])
                continue
            room = room if covered else 0  # none that is older has a place
            lost += self._end(pin)
        new = _Pin(tenant, until)
        self._of.setdefault(tenant, {})[new] = None
        self._number += 1
        heapq.heappush(self._due, (until, self._number, new))
        if len(self._due) > 2 * len(self) + ENDED_PINS:
            self._due = [each for each in self._due if each[2] in self._of.get(each[2].tenant, {})]
            heapq.heapify(self._due)
        lost += self._claims.claim(new, pages)
        return [page for page in lost if page not in self._claims]

    def expire(self, now: float) -> list[int]:
        """Ends the pins whose time is over; returns pages without a claim now."""
        lost = []
        while self._due and self._due[0][0] <= now:
            lost += self._end(heapq.heappop(self._due)[2])
        return lost

    def end_next(self) -> list[int] | None:
        """Ends the pin that is due first; None if there is none."""
        while self._due:
            pin = heapq.heappop(self._due)[2]
            if pin in self._of.get(pin.tenant, {}):
                return self._end(pin)
        return None

    def clear(self) -> None:
        """Forgets all pins; their claims are gone."""
        self._of.clear()
        self._due.clear()

    def _end(self, pin: _Pin) -> list[int]:
        pins = self._of.get(pin.tenant, {})
        if pin not in pins:
            return []
        del pins[pin]
        if not pins:
            del self._of[pin.tenant]
        return self._claims.end(pin)
