"""How much a client may send, and how slowly; all in one place."""

MAX_URL = 8 * 1024  # bytes of path and query
MAX_HEADERS = 128
MAX_HEADER_BYTES = 32 * 1024  # of all names and values together
MAX_HEAD_BYTES = MAX_URL + MAX_HEADER_BYTES + 4 * MAX_HEADERS + 1024  # before anything is parsed
HEADER_SECONDS = 10.0  # until a request's headers are there
MAX_BODY_BYTES = 4 * 2**20  # --max-body-bytes
BODY_SECONDS = 30.0  # until a body is there
CONTINUE_SECONDS = 1.0  # a client that waits for 100 Continue is told so after this in any case
STALLED_SECONDS = 30.0  # a client that takes nothing for so long is gone
WINDOW_BYTES = 256 * 1024  # of an answer that a client has not taken yet; then its stream waits
SEND_BUFFER_BYTES = 128 * 1024  # of a socket in the kernel, which doubles it
