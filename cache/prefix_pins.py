"""Pages of prompts that their clients want to have kept for a time.

A pin is a weight, not a lock: a pinned page that is free is allocated after all other free pages,
so that no request waits for the end of a pin. A tenant has so many pins at most; a new one takes
the place of its oldest.
"""

import heapq
from collections.abc import Iterable

TENANT_SHARE = 4  # a tenant pins at most one page in so many


class PrefixPins:
    """The pins by page: whose it is, and until when (seconds of the caller's clock)."""

    def __init__(self, num_pages: int) -> None:
        self._most = max(1, num_pages // TENANT_SHARE)  # of each tenant
        self._pins: dict[int, tuple[float, str]] = {}
        self._of: dict[str, dict[int, None]] = {}  # tenant -> its pages, the oldest pin first
        self._due: list[tuple[float, int, int]] = []  # a heap: (until, number, page)
        self._number = 0  # decreases, so that the end of a prefix goes before its start

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, page: int) -> bool:
        return page in self._pins

    def pin(self, tenant: str, pages: Iterable[int], until: float) -> list[int]:
        """Pins the first of ``pages``; returns older pages of the tenant that lose their pins."""
        lost = []
        for page in list(pages)[: self._most]:
            had = self._pins.get(page)
            if had is not None and had[0] > until:
                continue  # another request wants it for longer
            self.drop(page)
            own = self._of.setdefault(tenant, {})
            if len(own) >= self._most:
                oldest = next(iter(own))
                self.drop(oldest)
                lost.append(oldest)
                own = self._of.setdefault(tenant, {})
            own[page] = None
            self._pins[page] = (until, tenant)
            self._number -= 1
            heapq.heappush(self._due, (until, self._number, page))
        return lost

    def drop(self, page: int) -> None:
        """Ends the pin of a page, if it has one."""
        pin = self._pins.pop(page, None)
        if pin is not None:
            own = self._of[pin[1]]
            del own[page]
            if not own:
                del self._of[pin[1]]

    def expire(self, now: float) -> list[int]:
        """Ends the pins whose time is over; returns their pages."""
        pages = []
        while self._due and self._due[0][0] <= now:
            until, _, page = heapq.heappop(self._due)  # of a pin that may be gone
            if page in self._pins and self._pins[page][0] == until:
                self.drop(page)
                pages.append(page)
        return pages

    def clear(self) -> list[int]:
        """Ends all pins; returns their pages."""
        pages = list(self._pins)
        self._pins.clear()
        self._of.clear()
        self._due.clear()
        return pages
