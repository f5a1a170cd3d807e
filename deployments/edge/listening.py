"""How uvicorn listens in Serve's proxy, where Serve has no setting for it.

Serve opens a TCP socket and gives it to a ``uvicorn.Server``. ``install`` replaces that class and
``uvicorn.Config`` in this process: the server swaps the socket for a Unix socket, the configuration
adds settings of TLS, and reads the certificate again when its file changes.
"""

import asyncio
import json
import logging
import os
import socket
from typing import Any

import uvicorn

from rayfin.actors.timing import CERTIFICATE_CHECK_SECONDS
from rayfin.deployments.edge.listen_options import VARIABLE

logger = logging.getLogger("rayfin.http")
TLS = ("ssl_cert_reqs", "ssl_ciphers")


def install() -> None:
    """Makes servers of this process listen as the environment says (``Door.tell_proxies``)."""
    settings = json.loads(os.environ.get(VARIABLE) or "{}")
    if settings:
        uvicorn.Config = config_class(settings)  # type: ignore[misc]
        uvicorn.Server = server_class(settings)  # type: ignore[misc]


def config_class(settings: dict[str, Any]) -> type[uvicorn.Config]:
    """uvicorn's configuration with the TLS settings among ``settings``."""
    more = {name: value for name, value in settings.items() if name in TLS}

    class ListeningConfig(uvicorn.Config):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **(options | more))

    return ListeningConfig


def server_class(settings: dict[str, Any]) -> type[uvicorn.Server]:
    """uvicorn's server, which listens on ``uds`` and watches its certificate."""

    class ListeningServer(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            if settings.get("uds"):
                for given in sockets or ():
                    given.close()
                sockets = [unix_socket(settings["uds"])]
            await super().startup(sockets)
            if settings.get("enable_ssl_refresh"):
                files = CertificateFiles(self.config)
                self._watching = asyncio.create_task(files.watch())

    return ListeningServer


def unix_socket(path: str) -> socket.socket:
    """A socket bound to ``path``, whose permissions are those of a new file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    return listener


class CertificateFiles:
    """The certificate of a configuration: loads it whenever one of its files has changed."""

    def __init__(self, config: uvicorn.Config) -> None:
        assert config.ssl is not None and config.ssl_certfile is not None
        self._context, self._password = config.ssl, config.ssl_keyfile_password
        self._files = [str(config.ssl_certfile), str(config.ssl_keyfile or config.ssl_certfile)]
        self._seen = self._times()

    async def watch(self) -> None:
        """Never ends. A certificate that cannot be read is left alone until its file changes."""
        while True:
            await asyncio.sleep(CERTIFICATE_CHECK_SECONDS)
            if (now := self._times()) == self._seen:
                continue
            self._seen = now
            certfile, keyfile = self._files
            try:
                self._context.load_cert_chain(certfile, keyfile, self._password)
                logger.info("read the certificate again: %s", self._files[0])
            except OSError as error:
                logger.warning("kept the certificate: %s cannot be read: %s", self._files, error)

    def _times(self) -> list[int]:
        return [os.stat(name).st_mtime_ns if os.path.exists(name) else 0 for name in self._files]
