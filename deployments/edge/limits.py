"""How much a client may send, and how slowly; all in one place."""

MAX_URL = 8 * 1024  # bytes of path and query
MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 * 1024  # of all names and values together
MAX_BODY_BYTES = 4 * 2**20  # --max-body-bytes
BODY_SECONDS = 30.0  # until a body is there
STALLED_SECONDS = 30.0  # a client that takes nothing for so long is gone
