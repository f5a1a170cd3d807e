"""``--uds``, ``--ssl-*``: how the proxy listens, as Serve starts uvicorn in it."""

import asyncio
import json
import os
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.edge import listening
from rayfin.deployments.edge.listen_options import VARIABLE, ListenOptions

pytestmark = pytest.mark.anyio


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A certificate for localhost, signed by itself, and its key."""
    files = folder / f"{name}.pem", folder / f"{name}.key"
    line = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    made = [*line.split(), "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*made, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


@asynccontextmanager
async def proxy(
    listen_options: ListenOptions, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[int]:
    """uvicorn as Ray Serve starts it; gives the port that it was given."""
    monkeypatch.setenv(VARIABLE, "")
    listen_options.tell_proxies()
    monkeypatch.setattr(uvicorn, "Config", uvicorn.Config)  # both come back after the test
    monkeypatch.setattr(uvicorn, "Server", uvicorn.Server)
    listening.install()
    options = listen_options.http_options("127.0.0.1", 0)
    taken = socket.socket()
    taken.bind((options.pop("host"), options.pop("port")))
    port = taken.getsockname()[1]
    config = uvicorn.Config(hello, log_level="critical", lifespan="off", **options)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[taken]))
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0)
    try:
        yield port
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 30)
        listen_options.close()


async def get(url: str, **options: Any) -> str:
    transport = httpx.AsyncHTTPTransport(**options)
    async with httpx.AsyncClient(transport=transport) as client:
        return (await client.get(url)).text


async def test_a_unix_socket_in_place_of_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "api.sock")
    async with proxy(ListenOptions(uds=path), monkeypatch) as port:
        assert await get("http://localhost/", uds=path) == "hello"
        with pytest.raises(InvalidConfig, match="Address already in use"):
            ListenOptions(uds=path).require_free()
        with pytest.raises(httpx.ConnectError):
            await get(f"http://127.0.0.1:{port}/")
    assert not os.path.exists(path)


def test_what_a_socket_may_replace(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    listening.unix_socket(str(path)).close()  # left behind by a process that died
    ListenOptions(uds=str(path)).require_free()
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(InvalidConfig, match="is a file"):
        ListenOptions(uds=str(path)).require_free()
    with pytest.raises(InvalidConfig, match="there is no folder"):
        ListenOptions(uds=str(tmp_path / "no" / "api.sock")).require_free()


@pytest.mark.parametrize("needed", [False, True])
async def test_certificates_of_server_and_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: bool
) -> None:
    own, key = certificate(tmp_path, "server")
    client, client_key = certificate(tmp_path, "client")
    listen_options = ListenOptions(ssl_certfile=str(own), ssl_keyfile=str(key))
    if needed:
        listen_options = ListenOptions(
            ssl_certfile=str(own),
            ssl_keyfile=str(key),
            ssl_ca_certs=str(client),
            ssl_cert_reqs=2,
        )
    async with proxy(listen_options, monkeypatch) as port:
        trust = ssl.create_default_context(cafile=str(own))
        url = f"https://localhost:{port}/"
        if needed:
            with pytest.raises(httpx.TransportError):
                await get(url, verify=trust)
            trust.load_cert_chain(client, client_key)
        assert await get(url, verify=trust) == "hello"
        with pytest.raises(httpx.ConnectError):  # of somebody else
            await get(url, verify=ssl.create_default_context(cafile=str(client)))


async def test_a_new_certificate_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "CERTIFICATE_CHECK_SECONDS", 0.01)
    own, key = certificate(tmp_path, "server")
    other, other_key = certificate(tmp_path, "other")
    listen_options = ListenOptions(
        ssl_certfile=str(own), ssl_keyfile=str(key), enable_ssl_refresh=True
    )
    trust = ssl.create_default_context(cafile=str(other))
    async with proxy(listen_options, monkeypatch) as port:
        key.write_text("half")  # refused, and the old one stays
        for source, target in ((other_key, key), (other, own)):
            target.write_bytes(source.read_bytes())
        async with asyncio.timeout(30):
            while True:
                try:
                    assert await get(f"https://localhost:{port}/", verify=trust) == "hello"
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ssl_certfile": "nowhere"}, "ssl_certfile: there is no file nowhere"),
        ({"ssl_cert_reqs": 3}, "ssl_cert_reqs must be 0, 1 or 2"),
        ({"ssl_ca_certs": __file__}, "ssl_ca_certs needs ssl_certfile"),
        ({"ssl_certfile": __file__, "ssl_cert_reqs": 2}, "ssl_cert_reqs needs ssl_ca_certs"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        ListenOptions(**settings)


def test_a_running_cluster_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ListenOptions(ssl_certfile=__file__).require_own_ray()  # Serve has a setting for it
    with pytest.raises(InvalidConfig, match="uds needs a Ray of its own"):
        ListenOptions(uds="x").require_own_ray()
    monkeypatch.setenv(VARIABLE, "{}")
    ListenOptions(uds="x").tell_proxies()
    assert json.loads(os.environ[VARIABLE]) == {"uds": os.path.abspath("x")}


def test_addresses_to_print() -> None:
    assert ListenOptions().address("0.0.0.0", 80) == ("http://127.0.0.1:80", "")
    assert ListenOptions(ssl_certfile=__file__).address("::", 80) == ("https://127.0.0.1:80", "")
    assert ListenOptions(uds="/s").address("h", 80) == ("http://localhost", "--unix-socket /s ")
