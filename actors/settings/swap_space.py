"""How many pages of host memory preempted requests are swapped to."""

from typing import TYPE_CHECKING

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.settings.choices import Preemption, SchedulerName

if TYPE_CHECKING:
    from rayfin.actors.config import EngineArgs

DEFAULT_PREEMPTION: dict[SchedulerName, Preemption] = {"v1": "recompute", "v0": "swap"}


def resolve_host_pages(args: "EngineArgs", page_bytes: int, most: int) -> int:
    """Returns the pages of swap space, at most ``most``; 0 if preempted requests are recomputed.

    Raises:
        InvalidConfig: preemption is "swap", and there is no room for a page.
    """
    if (args.preemption or DEFAULT_PREEMPTION[args.scheduler]) == "recompute" or not page_bytes:
        return 0
    pages = int(args.swap_space * 2**30) // page_bytes
    if pages < 1 and args.preemption == "swap":
        raise InvalidConfig(
            f"swap_space ({args.swap_space} GiB) does not hold a page of {page_bytes:,} bytes",
            "swap_space",
        )
    return min(pages, most)
