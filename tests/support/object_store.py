"""A store that speaks as much of S3 as pyarrow asks for, counts bytes, and can misbehave."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

WHEN = "2026-01-02T03:04:05.000Z"
WHEN_HTTP = "Fri, 02 Jan 2026 03:04:05 GMT"


class ObjectStore:
    """The files of a folder as the bucket ``bucket``; ``allowed`` is whether it answers.

    It sends ``cut`` bytes of a file and breaks off, ``cuts`` times; to ``busy`` readers of files it
    says 503; while ``hold`` is set, large answers stop at their half, and ``holding`` says so.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.allowed = True
        self.cut = self.cuts = self.busy = 0
        self.hold, self.holding = threading.Event(), threading.Event()
        self.sent: Counter[str] = Counter()  # bytes of each file


@contextmanager
def serving(store: ObjectStore) -> Iterator[str]:
    """Serves it; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            url = urlsplit(self.path)
            _, bucket, *rest = unquote(url.path).split("/", 2)
            key = rest[0] if rest else ""
            if not store.allowed:
                return self._error(403, "AccessDenied", body)
            if bucket != "bucket":
                return self._error(404, "NoSuchBucket", body)
            if not key:
                prefix = parse_qs(url.query).get("prefix", [""])[0]
                return self._reply(200, listing(store.root, prefix), body)
            file = store.root / key
            if not file.is_file():
                return self._error(404, "NoSuchKey", body)
            return self._file(key, file.read_bytes(), body)

        def _file(self, key: str, data: bytes, body: bool) -> None:
            whole, status, headers = len(data), 200, {}
            if asked := self.headers.get("Range"):
                first, last = asked.removeprefix("bytes=").split("-")
                data, status = data[int(first) : int(last or whole - 1) + 1], 206
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{whole}"
            if body and store.busy > 0:
                store.busy -= 1
                return self._error(503, "SlowDown", body)
            sent = data
            if body and 0 < store.cut < len(data) and store.cuts > 0:
                store.cuts -= 1
                sent = data[: store.cut]
            if body:
                store.sent[key] += len(sent)
            self._reply(status, data, body, sent, headers | {"Last-Modified": WHEN_HTTP})
            self.close_connection = len(sent) < len(data)
            return None

        def _error(self, status: int, code: str, body: bool) -> None:
            text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
            self._reply(status, text.encode(), body)

        def _reply(
            self,
            status: int,
            data: bytes,
            body: bool,
            sent: bytes | None = None,
            headers: dict[str, str] | None = None,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", "application/xml")
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # a reader that was killed
                self._write(data if sent is None else sent, body)

        def _write(self, part: bytes, body: bool) -> None:
            if body and store.hold.is_set() and len(part) > 1 << 16:
                half = len(part) // 2
                self.wfile.write(part[:half])
                store.holding.set()
                while store.hold.is_set():
                    time.sleep(0.01)
                part = part[half:]
            if body:
                self.wfile.write(part)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def listing(root: Path, prefix: str) -> bytes:
    """ListObjectsV2's answer, whole in one page."""
    rows = [
        f"<Contents><Key>{escape(key)}</Key><Size>{path.stat().st_size}</Size>"
        f"<LastModified>{WHEN}</LastModified></Contents>"
        for path in sorted(root.rglob("*"))
        if path.is_file() and (key := str(path.relative_to(root))).startswith(prefix)
    ]
    text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}</ListBucketResult>"
    return text.encode()
