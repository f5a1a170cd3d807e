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


# The files of the page at /ui, and where each is found.

SCRIPT = "text/javascript; charset=utf-8"
FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
    **{f"/ui/{name}": (name, SCRIPT) for name in ("app.js", "chat.js", "live.js", "draw.js")},
}
"""Path -> (file, media type)."""

PAGE_PATHS = frozenset(FILES)
"""What needs no key: the page asks for one itself. Its data, /ui/state, needs it."""
