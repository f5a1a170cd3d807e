"""How many states of recurrent layers are kept beside those of the running requests."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayfin.actors.config import BatchLimits, EngineArgs, ModelFacts

DRAFT_STATES = {"cpu": 32, "cuda": 64}
"""Most drafts of a step, on a device: each may turn out to be the last right one, and has a state.

A CPU gains nothing by more, and states of a large model are tens of megabytes.
"""


def resolve_snapshots(args: "EngineArgs", facts: "ModelFacts", limits: "BatchLimits") -> int:
    """Returns how many states are kept for prefix hits: two for each slot.

    They take at most a quarter of the memory for pages. V0 has none: a prompt's chunk would have to
    end where the snapshot is taken.
    """
    if not facts.state_bytes or not args.prefix_caching or args.scheduler == "v0":
        return 0
    room = max(args.kv_cache_memory or facts.available_bytes, 0) // 4
    return int(min(2 * limits.max_decoding_batch, room // facts.state_bytes))


def draft_states(args: "EngineArgs", limits: "BatchLimits", device: str) -> int:
    """Returns how many states are kept for drafts; 0 without speculation."""
    if args.speculation is None:
        return 0
    return max(min(limits.max_decoding_batch - 1, DRAFT_STATES[device]), 1)
