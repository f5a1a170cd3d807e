"""Fetches an image or clip from a public address, and from no other.

A name is resolved once; all of its addresses must be public, and the connection goes to one of
them, so that a second answer of the name server changes nothing. Each redirect is checked anew.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

import httpx

from rayfin.actors.errors import InvalidRequest, MediaUnavailable
from rayfin.deployments.media.settings import MediaSettings

REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
HEADERS = {"accept": "image/*, audio/*", "accept-encoding": "identity", "user-agent": "rayfin"}
NAT64 = ipaddress.ip_network("64:ff9b::/96")
GLOBAL6 = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out. The rest hides IPv4 in forms of its own, or is a site's."""
EXAMPLES6 = ipaddress.ip_network("3fff::/20")  # RFC 9637, which older Pythons do not know

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]


class MediaFetcher:
    """Fetches images and clips for requests.

    Args:
        resolve: name and port to addresses; the system's by default.
        is_allowed: which addresses are public.
    """

    def __init__(
        self,
        settings: MediaSettings,
        resolve: Resolve | None = None,
        is_allowed: Callable[[str], bool] | None = None,
    ) -> None:
        self._settings = settings
        self._resolve = resolve or _resolve
        self._is_allowed = is_allowed or is_public

    async def fetch(self, url: str, param: str, max_bytes: int) -> bytes:
        """Returns the bytes at an address.

        Raises:
            InvalidRequest: the address is refused, or gives nothing, too much, or too slowly.
            MediaUnavailable: its server fails.
        """
        if url[:5].lower() == "file:":
            return await asyncio.to_thread(self._read_file, url, param, max_bytes)
        try:
            async with asyncio.timeout(self._settings.timeout):
                return await self._fetch(url, param, max_bytes)
        except TimeoutError:
            raise _unavailable(param, "it took too long") from None
        except httpx.HTTPError as error:
            raise _unavailable(param, "its server cannot be reached") from error

    async def _fetch(self, url: str, param: str, max_bytes: int) -> bytes:
        for _ in range(REDIRECTS + 1):
            try:
                parsed = httpx.URL(url)
            except (httpx.InvalidURL, ValueError, TypeError):
                raise _refused(param) from None
            address = await self._pinned(parsed, param)
            data, location = await self._get(parsed, address, param, max_bytes)
            if data is not None:
                return data
            try:
                url = str(parsed.join(location))
            except (httpx.InvalidURL, ValueError):
                raise _refused(param) from None
        raise _unavailable(param, "it is redirected too often")

    async def _pinned(self, url: httpx.URL, param: str) -> str:
        """The address to connect to.

        Raises:
            InvalidRequest: the settings refuse it, or a name has an address that is not public.
        """
        settings, host = self._settings, url.host.rstrip(".").lower()
        named = host in settings.domains
        if not settings.urls or url.scheme not in PORTS or not host or url.userinfo:
            raise _refused(param)
        if settings.domains and not named:
            raise _refused(param)
        port = url.port or PORTS[url.scheme]
        if port not in PORTS.values() and not named:
            raise _refused(param)
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):
            raise _refused(param) from None
        if not addresses or not all(self._is_allowed(address) for address in addresses):
            raise _refused(param)
        return addresses[0]

    async def _get(
        self, url: httpx.URL, address: str, param: str, max_bytes: int
    ) -> tuple[bytes | None, str]:
        """The bytes, or None and where the server sends us instead."""
        pinned = url.copy_with(host=address, fragment=None)
        headers = {**HEADERS, "host": url.netloc.decode("ascii")}
        async with (
            httpx.AsyncClient(
                verify=_trust(), trust_env=False, timeout=self._settings.timeout
            ) as client,
            client.stream(
                "GET", pinned, headers=headers, extensions={"sni_hostname": url.host}
            ) as response,
        ):
            if response.is_redirect:
                return None, response.headers.get("location", "")
            if response.status_code >= 500:
                raise MediaUnavailable(f"'{param}': its server fails.", param)
            if response.status_code != 200:
                raise _unavailable(param, f"its server answers {response.status_code}")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise _unavailable(param, "its server sends it compressed")
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > max_bytes:
                    raise _unavailable(param, f"it has over {max_bytes} bytes")
            return bytes(body), ""

    def _read_file(self, url: str, param: str, max_bytes: int) -> bytes:
        """A file of the operator's folder."""
        if self._settings.folder is None:
            raise _refused(param)
        folder = Path(self._settings.folder).resolve()
        written = url[5:]
        if written.startswith("//"):
            host, _, rest = written[2:].partition("/")
            if host not in ("", "localhost"):
                raise _refused(param)
            written = "/" + rest
        try:
            path = Path(unquote(written)).resolve()
            if not path.is_relative_to(folder) or not path.is_file():
                raise _refused(param)
            with path.open("rb") as file:
                data = file.read(max_bytes + 1)
        except (OSError, ValueError):
            raise _refused(param) from None
        if len(data) > max_bytes:
            raise _unavailable(param, f"it has over {max_bytes} bytes")
        return data


def is_public(written: str) -> bool:
    """Whether everybody may be sent to an address: whatever form hides another is unwrapped."""
    try:
        address = ipaddress.ip_address(written)
    except ValueError:
        return False
    return all(map(_is_global, _unwrapped(address)))


def _is_global(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        if address not in GLOBAL6 or address in EXAMPLES6:
            return False
    return address.is_global and not address.is_multicast


def _unwrapped(address: Address) -> list[Address]:
    inner: list[Address] = []
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return [address.ipv4_mapped]
        inner += [ipv4 for ipv4 in (address.sixtofour, *(address.teredo or ())) if ipv4 is not None]
        if address in NAT64:
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
            return inner
    return [address, *inner]


async def _resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in infos]


@lru_cache(1)
def _trust() -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=False)


def _refused(param: str) -> InvalidRequest:
    """The same words for every reason: they tell nothing about a network."""
    return InvalidRequest(
        f"'{param}': this address is refused. Send the file as a data: address.",
        param,
        "media_url_refused",
    )


def _unavailable(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"'{param}': it cannot be fetched: {reason}.", param, "media_unavailable")
