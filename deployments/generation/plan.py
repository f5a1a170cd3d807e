"""How the answers of one request are guided and read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from rayfin.actors.guidance import Guidance

if TYPE_CHECKING:
    from rayfin.deployments.text.parsing.parser import OutputParser

UNENFORCED = "x-rayfin-unenforced"
LONGEST_HEADER = 4096  # bytes; proxies refuse the headers of an answer beyond 8 KiB or so


@dataclass(slots=True, frozen=True)
class OutputPlan:
    """Made by an API's adapter, after the warden has checked the grammars."""

    guidance: Guidance | None = None  # of all choices
    make_parser: "Callable[[], OutputParser] | None" = None  # a parser for each choice
    unenforced: tuple[str, ...] = ()  # paths of schema keywords, for x-rayfin-unenforced

    @property
    def headers(self) -> dict[str, str]:
        """Of the reply: what of the request's schemas is not enforced, as percent-encoded paths.

        Paths that do not fit are left out, and "..." is the last one.
        """
        paths = [quote(path, safe="/$.[]@:~") for path in self.unenforced]
        kept: list[str] = []
        for path in paths:
            if sum(map(len, kept)) + 2 * len(kept) + len(path) > LONGEST_HEADER:
                kept.append("...")
                break
            kept.append(path)
        return {UNENFORCED: ", ".join(kept)} if kept else {}


NO_PLAN = OutputPlan()
