"""The files of the page at /ui, and where each is found."""

SCRIPT = "text/javascript; charset=utf-8"
FILES = {
    "/ui": ("index.html", "text/html; charset=utf-8"),
    "/ui/style.css": ("style.css", "text/css; charset=utf-8"),
    **{f"/ui/{name}": (name, SCRIPT) for name in ("app.js", "chat.js", "live.js", "draw.js")},
}
"""Path -> (file, media type)."""

PAGE_PATHS = frozenset(FILES)
"""What needs no key: the page asks for one itself. Its data, /ui/state, needs it."""
