"""Paths of the operators' routes and of the page at /ui, listed in full."""

ADMIN_PATHS = frozenset(
    {
        "/admin/engines",
        "/admin/drain",
        "/admin/admit",
        "/admin/cache/reset",
        "/admin/sleep",
        "/admin/wake",
        "/reset_prefix_cache",  # vLLM's names for four of them
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/server_info",
        "/start_profile",
        "/stop_profile",
        "/admin/weights",  # new weights, and vLLM's and SGLang's routes for them
        "/admin/weights/update",
        "/pause",
        "/resume",
        "/is_paused",
        "/collective_rpc",
        "/get_world_size",
        "/weight_info",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/start_draft_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/shutdown_weight_transfer_engine",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/get_weight_version",
        "/weight_version",
        "/update_weight_version",
        "/weight_checker",
        "/weights_checker",
        "/get_weights_by_name",
        "/flush_cache",
        "/begin_weight_update",
        "/end_weight_update",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/init_weights_update_group",
        "/destroy_weights_update_group",
        "/update_weights_from_distributed",
        "/update_weights_from_tensor",
    }
)

ADAPTER_LIST = "/admin/adapters"
"""An operators' path beside the API only."""

ADAPTER_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Operators' paths too, unless the environment lets clients load adapters."""

SCRIPT = "text/javascript; charset=utf-8"
SCRIPTS = (
    *("app.js", "chat.js", "answer.js", "markdown.js", "pictures.js", "code.js"),
    *("settings.js", "examples.js", "live.js", "draw.js"),
)
FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
    **{f"/ui/{name}": (name, SCRIPT) for name in SCRIPTS},
}
"""Path -> (file, media type)."""

PAGE_PATHS = frozenset(FILES)
"""Paths that need no key: the page asks for one. Its data, /ui/state, needs the key."""
