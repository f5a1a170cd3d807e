"""Whether pages behind the windows of a model's layers are freed (``cache/window_tables.py``)."""

import logging
from typing import TYPE_CHECKING

from rayfin.actors.settings.kv_disk import DEFAULT_PREEMPTION
from rayfin.cache.kv_tensors import group_layers

if TYPE_CHECKING:
    from rayfin.actors.config import EngineArgs
    from rayfin.actors.runner.loading import LoadedModel

logger = logging.getLogger(__name__)


def frees_windows(args: "EngineArgs", loaded: "LoadedModel") -> bool:
    """Decides it, and logs why not where layers have windows: the one place that does."""
    layouts = loaded.model.layouts
    if all(layout.window is None for layout in layouts):
        return False
    groups = group_layers(layouts)
    why = _why_not(args, loaded)
    if groups is None:
        why = why or "layers with windows and without keep different bytes"
    if why is not None:
        logger.info("pages of all layers are kept as long as a request runs: %s", why)
        return False
    assert groups is not None
    windows = groups.windows
    logger.info(
        "pages behind windows of %d tokens are freed: %d group(s) of layers with a window, %s; "
        "sessions claim none, and other engines read none",
        *(windows.window, windows.beside or 1),
        "one that sees all tokens" if windows.beside else "all of them",
    )
    return True


def _why_not(args: "EngineArgs", loaded: "LoadedModel") -> str | None:
    """What does not know such pages, or None."""
    speculation = args.speculation
    swaps = (args.preemption or DEFAULT_PREEMPTION[args.scheduler]) == "swap"
    longest = args.max_model_len or loaded.max_position or 0
    window = max(layout.window or 0 for layout in loaded.model.layouts)
    grouped = any(layout.window is None for layout in loaded.model.layouts)
    reasons = {
        "disable_hybrid_kv_cache_manager": args.disable_hybrid_kv_cache_manager,
        f"no request is longer than the window of {window} tokens": 0 < longest <= window,
        "kv_disk_path": args.kv_disk_path is not None,
        "kv_offloading_size": args.kv_offloading_size is not None,
        "preempted requests are swapped to host memory": swaps and args.swap_space > 0,
        "check_pages": args.check_pages,
        "a draft model or head has layers beside": speculation is not None
        and speculation.one_device,
        "layers keep states": loaded.recurrent is not None,
        "prompts are computed whole": loaded.whole_prompts,
        "layers choose keys by an index": loaded.chooses_keys,
        "a pipeline shares its layers": loaded.peers is not None and loaded.peers.place.stages > 1,
        "the GPU's own decoder reads one table": grouped and loaded.gpu_model is not None,
    }
    return next((why for why, holds in reasons.items() if holds), None)
