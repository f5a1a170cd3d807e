"""Where pages are kept beyond the runners' memory: ``kv_disk_path``, and ``swap_space``."""

import math
import os
from typing import TYPE_CHECKING

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.settings.choices import Preemption, SchedulerName
from rayfin.cache.page_files import PageFolder

if TYPE_CHECKING:
    from rayfin.actors.config import EngineArgs, ModelFacts


def require_disk(args: "EngineArgs") -> None:
    """Checks the settings before a model is loaded.

    Raises:
        InvalidConfig: they are out of range, or there is no prefix cache whose pages to keep.
    """
    size = args.kv_disk_size
    if not 0 < size < math.inf:
        raise InvalidConfig(f"kv_disk_size must be over 0 GiB, got {size}", "kv_disk_size")
    if args.kv_disk_path is not None and (
        not args.kv_disk_path or os.path.isfile(os.path.expanduser(args.kv_disk_path))
    ):
        raise InvalidConfig(
            f"kv_disk_path must be a folder, got {args.kv_disk_path!r}", "kv_disk_path"
        )
    if args.kv_disk_path is not None and not args.prefix_caching:
        raise InvalidConfig(
            "kv_disk_path keeps pages of the prefix cache: it needs prefix_caching", "kv_disk_path"
        )


def page_folder(args: "EngineArgs", facts: "ModelFacts", *, shares: bool) -> PageFolder | None:
    """The folder of the pages, or None without one.

    Args:
        shares: the engine has a prefix cache.

    Raises:
        InvalidConfig: the model's prefixes are more than pages, or no page fits.
    """
    if args.kv_disk_path is None:
        return None
    if not (facts.page_namespace and shares):
        kind = "keeps recurrent states" if facts.state_bytes else "has no prefix cache"
        raise InvalidConfig(
            f"kv_disk_path cannot be used: {facts.architecture} {kind}, and pages alone are not "
            "enough",
            "kv_disk_path",
        )
    max_bytes = int(args.kv_disk_size * 2**30)
    if max_bytes < facts.page_bytes:
        raise InvalidConfig(
            f"kv_disk_size ({args.kv_disk_size} GiB) does not hold a page of "
            f"{facts.page_bytes:,} bytes",
            "kv_disk_size",
        )
    path = os.path.abspath(os.path.expanduser(args.kv_disk_path))
    return PageFolder(path, facts.page_namespace, max_bytes)


DEFAULT_PREEMPTION: dict[SchedulerName, Preemption] = {"v1": "recompute", "v0": "swap"}


def resolve_host_pages(args: "EngineArgs", facts: "ModelFacts", max_pages: int) -> int:
    """Returns the pages of swap space, up to ``max_pages``; 0: preempted requests are recomputed.

    Raises:
        InvalidConfig: preemption is "swap", and there is no room for a page.
    """
    page_bytes = 0 if facts.state_bytes or facts.whole_prompts else facts.page_bytes
    if (args.preemption or DEFAULT_PREEMPTION[args.scheduler]) == "recompute" or not page_bytes:
        return 0
    pages = int(args.swap_space * 2**30) // page_bytes
    if pages < 1 and args.preemption == "swap":
        raise InvalidConfig(
            f"swap_space ({args.swap_space} GiB) does not hold a page of {page_bytes:,} bytes",
            "swap_space",
        )
    return min(pages, max_pages)
