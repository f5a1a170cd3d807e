"""What would fit where the longest request does not."""

from typing import TYPE_CHECKING

from rayfin.actors.errors import InvalidConfig, NoRoomNow
from rayfin.actors.settings.lora_limits import least_adapters

if TYPE_CHECKING:
    from rayfin.actors.config import EngineArgs, ModelFacts


def too_long(args: "EngineArgs", facts: "ModelFacts", wanted: int, available: int) -> InvalidConfig:
    """Names what would fit: settings with the longest request that each makes room for.

    Args:
        wanted: tokens of the longest request.
        available: bytes for pages.

    Returns:
        A NoRoomNow where ``available`` was measured, and not set by ``args``.
    """
    size, page, saved = args.page_size, facts.page_bytes, facts.int4_saves
    needed = -(-wanted // size)
    pages = max(args.num_pages or available // page, 0)
    ways = [("max_model_len {}", pages * size)]
    for name, smaller in facts.smaller_pages if args.num_pages is None else ():
        ways.append((f"kv_cache_dtype {name!r} for {{}}", available // smaller * size))
    if args.num_pages is None and args.kv_cache_memory is None and saved:
        longest = (available + saved) // page * size
        ways.append((f"quantization 'int4' ({saved:,} bytes less) for {{}}", longest))
    if args.num_pages is None and args.kv_cache_memory is None and facts.adapter_bytes:
        least, saved = least_adapters(args, facts.adapter_bytes, facts.device)
        ways.append(
            (f"{least} ({saved:,} bytes less) for {{}}", (available + saved) // page * size)
        )
    more = f"memory_utilization for {needed * page - available:,} bytes more"
    fixed = args.num_pages or args.kv_cache_memory
    if fixed:
        more = f"num_pages {needed}" if args.num_pages else f"kv_cache_memory {needed * page}"
    clip = facts.clip_tokens  # does not count in max_model_len
    fits = [way.format(min(longest, wanted) - clip) for way, longest in ways if longest > clip]
    return (InvalidConfig if fixed else NoRoomNow)(
        f"a request of {wanted} tokens needs {needed} pages ({needed * page:,} bytes), {pages} "
        f"fit. What fits: {'; '.join([*fits, more])}",
        "max_model_len",
    )
