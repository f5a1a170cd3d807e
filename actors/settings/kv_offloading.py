"""How many pages that a GPU's prefix cache evicts host memory takes: ``kv_offloading_size``."""

import math
from typing import TYPE_CHECKING

from rayfin.actors.errors import InvalidConfig

if TYPE_CHECKING:
    from rayfin.actors.config import EngineArgs, ModelFacts

FIELD = "kv_offloading_size"


def require_offloading(args: "EngineArgs") -> None:
    """Checks the setting before a model is loaded.

    Raises:
        InvalidConfig: it is out of range, or there is no prefix cache whose pages to keep.
    """
    size = args.kv_offloading_size
    if size is None:
        return
    if not 0 < size < math.inf:
        raise InvalidConfig(f"{FIELD} must be over 0 GiB, got {size}", FIELD)
    if not args.prefix_caching:
        raise InvalidConfig(
            f"{FIELD} keeps pages of the prefix cache: it needs prefix_caching", FIELD
        )


def offloaded_pages(args: "EngineArgs", facts: "ModelFacts", *, shares: bool) -> int:
    """Returns how many pages each rank keeps in host memory.

    Args:
        shares: the engine has a prefix cache.

    Raises:
        InvalidConfig: the engine computes on a CPU, the model's prefixes are more than pages, or no
            page fits.
    """
    if args.kv_offloading_size is None:
        return 0
    if facts.device == "cpu":
        raise InvalidConfig(
            f"{FIELD} keeps pages of a GPU in host memory, and this engine's are there: more "
            "num_pages or kv_cache_memory does the same, and a kv_disk_path on a tmpfs outlives "
            "runners (of kv_transfer_config it is cpu_bytes_to_use)",
            FIELD,
        )
    if facts.state_bytes or not shares:
        kind = "keeps recurrent states" if facts.state_bytes else "has no prefix cache"
        raise InvalidConfig(
            f"{FIELD} cannot be used: {facts.architecture} {kind}, and pages alone are not enough",
            FIELD,
        )
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    pages = int(args.kv_offloading_size * 2**30) // (facts.page_bytes * ranks)
    if pages < 1:
        raise InvalidConfig(
            f"{FIELD} ({args.kv_offloading_size} GiB) does not hold a page of "
            f"{facts.page_bytes:,} bytes of each of {ranks} rank(s)",
            FIELD,
        )
    return pages
