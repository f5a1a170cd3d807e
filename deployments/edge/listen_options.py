"""How ``rayfin serve`` listens: a Unix socket, TLS. Imports nothing that takes time."""

import json
import os
import socket
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig

VARIABLE = "RAYFIN_DOOR"
"""The environment variable by which Serve's proxy learns what Serve has no setting for."""

CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK_PATH = "rayfin.deployments.edge.proxy.middlewares"
"""The environment variable that names layers for Serve's proxy, and ours."""

LOCALHOST = "127.0.0.1"


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """What the API listens on beside a host and a port: one field per flag."""

    uds: str | None = _flag(
        None, "path of a Unix socket to listen on, in place of --host and --port"
    )
    ssl_keyfile: str | None = _flag(None, "file with the key of --ssl-certfile, if not in the same")
    ssl_certfile: str | None = _flag(None, "file with the certificate for HTTPS")
    ssl_ca_certs: str | None = _flag(None, "file with certificates that sign those of clients")
    ssl_cert_reqs: int = _flag(
        0, "whether clients need certificates: 0 no, 1 those that have one show it, 2 yes"
    )
    ssl_ciphers: str | None = _flag(None, "ciphers of OpenSSL's list; default: uvicorn's")
    enable_ssl_refresh: bool = _flag(False, "read the certificate again when its file changes")

    def __post_init__(self) -> None:
        for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
            if (path := getattr(self, name)) is not None and not Path(path).is_file():
                raise InvalidConfig(f"{name}: there is no file {path}", name)
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise InvalidConfig(
                f"ssl_cert_reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}", "ssl_cert_reqs"
            )
        needs = ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers")
        for name in (*needs, "enable_ssl_refresh"):
            if getattr(self, name) and self.ssl_certfile is None:
                raise InvalidConfig(f"{name} needs ssl_certfile", name)
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise InvalidConfig("ssl_cert_reqs needs ssl_ca_certs", "ssl_cert_reqs")

    @property
    def settings(self) -> dict[str, Any]:
        """What Serve has no setting for, by name."""
        ours = ("uds", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh")
        return {name: value for name, value in asdict(self).items() if name in ours and value}

    def http_options(self, host: str, port: int) -> dict[str, Any]:
        """Serve's ``http_options``. Its proxy closes the port at once if there is a Unix socket."""
        options: dict[str, Any] = {"host": host, "port": port}
        if self.uds is not None:
            options = {"host": LOCALHOST, "port": _any_port()}
        if self.ssl_certfile is not None:
            options["ssl_certfile"] = os.path.abspath(self.ssl_certfile)
            options["ssl_keyfile"] = os.path.abspath(self.ssl_keyfile or self.ssl_certfile)
            if self.ssl_ca_certs is not None:
                options["ssl_ca_certs"] = os.path.abspath(self.ssl_ca_certs)
        return options

    def tell_proxies(self) -> None:
        """Puts ``settings`` into the environment, which a new Ray's processes inherit."""
        settings = self.settings
        if self.uds is not None:
            settings["uds"] = os.path.abspath(self.uds)
        os.environ[VARIABLE] = json.dumps(settings)

    def require_own_ray(self) -> None:
        """Refuses settings that do not reach the proxies of a cluster that runs already.

        Raises:
            InvalidConfig: such a setting.
        """
        for name in self.settings:
            raise InvalidConfig(f"{name} needs a Ray of its own, and a cluster runs already", name)

    def require_free(self) -> None:
        """Makes way for the Unix socket: removes one that nothing listens on.

        Raises:
            InvalidConfig: something listens on it, or it is another file.
        """
        if self.uds is None:
            return
        path = Path(self.uds)
        if not path.parent.is_dir():
            raise InvalidConfig(f"uds: there is no folder {path.parent}", "uds")
        if not path.exists():
            return
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise InvalidConfig(f"uds: {path} is a file, not a socket", "uds")
        with socket.socket(socket.AF_UNIX) as probe:
            with suppress(OSError):
                probe.connect(str(path))
                raise InvalidConfig(f"cannot listen on {path}: Address already in use", "uds")
        path.unlink()

    def close(self) -> None:
        """Removes the Unix socket."""
        if self.uds is not None:
            Path(self.uds).unlink(missing_ok=True)

    def address(self, host: str, port: int) -> tuple[str, str]:
        """Returns the URL of the server, and what curl needs beside it."""
        if self.uds is not None:
            return "http://localhost", f"--unix-socket {self.uds} "
        host = LOCALHOST if host in ("0.0.0.0", "::") else host
        scheme = "http" if self.ssl_certfile is None else "https"
        return f"{scheme}://{host}:{port}", ""


PLAIN = ListenOptions()


def _any_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        port: int = probe.getsockname()[1]
    return port
