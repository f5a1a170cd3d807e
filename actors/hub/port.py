"""The hub's own HTTP port: the text of all metrics, whatever the path."""

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
IDLE_SECONDS = 30.0  # of a connection


def listen(port: int, text: Callable[[], bytes]) -> ThreadingHTTPServer:
    """Serves what ``text`` returns, uncompressed, in threads of its own.

    Raises:
        OSError: somebody has the port.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_SECONDS

        def do_GET(self) -> None:
            told = text()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are no news."""

    server = ThreadingHTTPServer(("", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server
