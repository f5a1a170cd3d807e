"""How the answers of one request are guided and read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayfin.actors.guidance import Guidance

if TYPE_CHECKING:
    from rayfin.deployments.text.parsing.parser import OutputParser


@dataclass(slots=True, frozen=True)
class OutputPlan:
    """Made by an API's adapter, after the warden has checked the grammars."""

    guidance: Guidance | None = None  # of all choices
    make_parser: "Callable[[], OutputParser] | None" = None  # a parser for each choice
    unenforced: tuple[str, ...] = ()  # paths of schema keywords, for x-rayfin-unenforced


NO_PLAN = OutputPlan()
