"""Where an operator's routes are, the whole list: nothing below them is open by its prefix."""

ADMIN_PATHS = frozenset(
    {
        "/admin/engines",
        "/admin/drain",
        "/admin/admit",
        "/admin/cache/reset",
        "/admin/sleep",
        "/admin/wake",
        "/reset_prefix_cache",  # vLLM's names for four of these
        "/sleep",
        "/wake_up",
        "/is_sleeping",
    }
)
