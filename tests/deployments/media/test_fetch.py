"""No image is fetched from an address that is not everybody's, however it is written."""

import gzip
import http.server
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image

from rayfin.actors.errors import InvalidRequest, MediaUnavailable, RayfinError
from rayfin.deployments.media.fetch import MediaFetcher, is_public
from rayfin.deployments.media.settings import MediaSettings, read_limits

pytestmark = pytest.mark.anyio
PUBLIC = "93.184.216.34"
LIMIT = 10_000
PATIENCE = 60.0  # seconds; only a failure waits so long


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


NOT_PUBLIC = (
    *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1"),
    *("169.254.169.254", "100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "240.0.0.1"),
    *("255.255.255.255", "::", "::1", "fe80::1", "fc00::1", "ff02::1", "2001:db8::1"),
    *("::ffff:10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("2002:7f00:1::", "2002:a00:1::", "no address", ""),
    *("::10.0.0.1", "::ffff:0:10.0.0.1", "fec0::1", "fe80::1%eth0", "64:ff9b:1::7f00:1", "100::1"),
    *("2001::1", "2001:0:a00:1::", "3fff::1", "5f00::1", "4000::1", "ff05::1"),
)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", [PUBLIC, "2606:2800:220:1::1", "64:ff9b::5db8:d822"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


REFUSED = (
    *("http://127.0.0.1/a.png", "http://127.1/a.png", "http://2130706433/a.png"),
    *("http://0x7f000001/a.png", "http://0/a.png", "http://[::1]/a.png", "http://localhost/a.png"),
    *("http://[::ffff:10.0.0.1]/a.png", "http://169.254.169.254/latest/meta-data"),
    *("http://[64:ff9b::7f00:1]/", "http://[fe80::1]/", "http://10.0.0.1/", "http://0.0.0.0/"),
    *("ftp://93.184.216.34/a.png", "gopher://93.184.216.34/", "http:///a.png", "http://"),
    *("//93.184.216.34/a.png", "http://user:pass@93.184.216.34/a.png", "javascript:alert(1)"),
    *("http://93.184.216.34:22/a.png", "http://93.184.216.34:8000/a.png", "a.png", "http://[::"),
    *("file:///etc/passwd", "file://host/a.png", "http://\u2024/", "http://a\x00b/"),
    "http://" + "a" * 300 + "/",
)


@pytest.mark.parametrize("url", REFUSED)
async def test_refused_addresses(url: str) -> None:
    """With the same words for all of them, and no address in these."""
    with pytest.raises(InvalidRequest) as refused:
        await MediaFetcher(MediaSettings(timeout=5.0)).fetch(url, "messages[0]", LIMIT)
    assert refused.value.code == "media_url_refused" and refused.value.param == "messages[0]"
    assert str(refused.value) == (
        "'messages[0]': this address is refused. Send the file as a data: address."
    )


async def test_every_address_of_a_name_must_be_public() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return [PUBLIC, "10.0.0.1"]

    with pytest.raises(InvalidRequest, match="is refused"):
        await MediaFetcher(MediaSettings(), resolve).fetch("http://two.example/", "m", LIMIT)


async def test_a_second_answer_of_a_name_server_changes_nothing(port: int) -> None:
    """A name is resolved once for each address, and the connection goes to what was checked."""
    answers = [["169.254.169.254"], ["127.0.0.1"]]

    async def resolve(host: str, asked: int) -> list[str]:
        return answers.pop()

    settings = MediaSettings(domains=("good.example",))
    fetcher = MediaFetcher(settings, resolve, lambda address: address == "127.0.0.1")
    url = f"http://good.example:{port}"
    assert await fetcher.fetch(f"{url}/png", "m", LIMIT) == png() and len(answers) == 1
    answers.append(["127.0.0.1"])
    with pytest.raises(InvalidRequest, match="is refused"):  # its redirect is resolved anew
        await fetcher.fetch(f"{url}/hop", "m", LIMIT)
    assert not answers


async def test_three_redirects_are_followed(port: int) -> None:
    async def resolve(host: str, asked: int) -> list[str]:
        return ["127.0.0.1"]

    settings = MediaSettings(domains=("good.example",))
    fetcher = MediaFetcher(settings, resolve, lambda address: True)
    url = f"http://good.example:{port}"
    assert await fetcher.fetch(f"{url}/hops3", "m", LIMIT) == png()
    with pytest.raises(InvalidRequest, match="too often"):
        await fetcher.fetch(f"{url}/hops4", "m", LIMIT)


async def test_domains_and_no_urls() -> None:
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["10.0.0.1"]

    only = MediaFetcher(MediaSettings(domains=("good.example",)), resolve)
    for url in ("http://bad.example/", "http://good.example.bad.example/", f"http://{PUBLIC}/"):
        with pytest.raises(InvalidRequest, match="is refused"):
            await only.fetch(url, "m", LIMIT)
    assert not asked, "a name that is not allowed was asked for"
    with pytest.raises(InvalidRequest, match="is refused"):  # allowed, and still not public
        await only.fetch("http://GOOD.example:8000/", "m", LIMIT)
    assert asked == ["good.example"]
    with pytest.raises(InvalidRequest, match="is refused"):
        await MediaFetcher(MediaSettings(urls=False)).fetch(f"http://{PUBLIC}/", "m", LIMIT)


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(file, "PNG")
    return file.getvalue()


class _Server(http.server.BaseHTTPRequestHandler):
    hosts: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.hosts.append(self.headers["host"])
        assert "cookie" not in self.headers and "authorization" not in self.headers
        name = self.path.strip("/")
        try:
            getattr(self, f"give_{name}")()
        except (BrokenPipeError, ConnectionResetError):
            pass

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def give_png(self) -> None:
        self._send(200, png(), set_cookie="a=b")

    def give_hop(self) -> None:
        self._send(302, location="/png")

    def give_hops4(self) -> None:
        self._send(302, location="/hops3")

    def give_hops3(self) -> None:
        self._send(302, location="/hops2")

    def give_hops2(self) -> None:
        self._send(302, location="/hop")

    def give_inside(self) -> None:
        self._send(302, location="http://169.254.169.254/latest")

    def give_scheme(self) -> None:
        self._send(302, location="file:///etc/passwd")

    def give_loop(self) -> None:
        self._send(302, location="/loop")

    def give_large(self) -> None:
        self._send(200, b"x" * (LIMIT + 1))

    def give_endless(self) -> None:
        self._send(200)
        while True:
            self.wfile.write(b"x" * 1000)

    def give_slow(self) -> None:
        self._send(200)
        for _ in range(100):
            self.wfile.write(b"x")
            self.wfile.flush()
            time.sleep(0.05)

    def give_bomb(self) -> None:
        self._send(200, gzip.compress(bytes(10**7)), content_encoding="gzip")

    def give_missing(self) -> None:
        self._send(404)

    def give_nothing(self) -> None:
        self._send(204)

    def give_broken(self) -> None:
        self._send(500)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def local(port: int) -> Callable[[str], Any]:
    """Fetches from the local server, which stands for a public one that has a name."""

    async def resolve(host: str, asked: int) -> list[str]:
        return ["127.0.0.1"] if host == "good.example" else ["169.254.169.254"]

    def fetch(path: str) -> Any:
        timeout = 1.0 if path == "slow" else PATIENCE
        settings = MediaSettings(domains=("good.example",), timeout=timeout)
        fetcher = MediaFetcher(settings, resolve, lambda address: address == "127.0.0.1")
        return fetcher.fetch(f"http://good.example:{port}/{path}", "m", LIMIT)

    return fetch


async def test_fetched_with_its_name(local: Callable[[str], Any], port: int) -> None:
    _Server.hosts.clear()
    assert await local("png") == png() and await local("hop") == png()
    assert set(_Server.hosts) == {f"good.example:{port}"}


@pytest.mark.parametrize(
    ("path", "code"),
    [
        *(("inside", "media_url_refused"), ("scheme", "media_url_refused")),
        *((name, "media_unavailable") for name in ("loop", "large", "endless", "slow", "bomb")),
        *((name, "media_unavailable") for name in ("missing", "nothing")),
    ],
)
async def test_what_a_server_may_not_do(local: Callable[[str], Any], path: str, code: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        await local(path)
    assert error.value.code == code


async def test_a_server_that_fails(local: Callable[[str], Any]) -> None:
    with pytest.raises(MediaUnavailable) as error:
        await local("broken")
    assert error.value.status == 502


async def test_files_of_the_operators_folder(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a b.png").write_bytes(png())
    (folder / "large.png").write_bytes(bytes(LIMIT + 1))
    (tmp_path / "secret").write_text("x")
    (folder / "link").symlink_to(tmp_path / "secret")
    fetcher = MediaFetcher(MediaSettings(folder=str(folder)))
    assert await fetcher.fetch(f"file://{folder}/a%20b.png", "m", LIMIT) == png()
    for name in ("../secret", "link", "none.png", ".", "%00", "..%2fsecret"):
        with pytest.raises(RayfinError, match="is refused"):
            await fetcher.fetch(f"file://{folder}/{name}", "m", LIMIT)
    with pytest.raises(InvalidRequest, match="over 10000 bytes"):
        await fetcher.fetch(f"file://{folder}/large.png", "m", LIMIT)


def test_limits_of_images() -> None:
    assert read_limits(None) == 8 and read_limits('{"image": 2, "video": 0}') == 2
    assert read_limits({"image": {"count": 3}}) == 3
    for wrong in ("x", "[]", {"image": -1}, {"image": True}, {"pictures": 1}, {"image": "2"}):
        with pytest.raises(RayfinError, match="limit_mm_per_prompt"):
            read_limits(wrong)
