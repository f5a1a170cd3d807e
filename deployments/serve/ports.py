"""Whether the ports of a server are free, before Ray starts. Imports nothing that takes time."""

import os
import socket
import tempfile
from pathlib import Path

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.edge.listen_options import PLAIN, ListenOptions
from rayfin.deployments.serve.server_args import ServerArgs


def require_ports(
    server: ServerArgs, host: str, port: int, listen_options: ListenOptions = PLAIN
) -> None:
    """Checks the ports of a server on a Ray of its own.

    Where a Ray cluster runs already, its Serve may be what listens: that is checked later.

    Raises:
        InvalidConfig: one is taken, or two are the same.
    """
    check_ports(server, port)
    listen_options.require_free()
    if not joins_cluster():
        if listen_options.uds is None:
            require_free(host, port, "port")
        require_own_ports(server)


def joins_cluster() -> bool:
    """Whether ``ray.init`` would look for a cluster that runs already."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    started = Path(folder, "ray", "ray_current_cluster").exists()  # `ray start` writes it
    return bool(os.environ.get("RAY_ADDRESS")) or started


def check_ports(server: ServerArgs, port: int) -> None:
    """Raises:
    InvalidConfig: two doors have one port, or the operators' has no key.
    """
    for name in ("metrics_port", "admin_port"):
        if getattr(server, name) == port:
            raise InvalidConfig(f"{name} must not be the API's, {port}", name)
    if server.admin_port is not None and server.admin_keys() is None:
        raise InvalidConfig("admin_port needs admin_api_key", "admin_port")


def require_own_ports(server: ServerArgs) -> None:
    """Raises:
    InvalidConfig: one of the ports beside the API's is taken.
    """
    if server.metrics_port is not None:
        require_free("0.0.0.0", server.metrics_port, "metrics_port")
    if server.admin_port is not None:
        require_free(server.admin_host, server.admin_port, "admin_port")


def require_free(host: str, port: int, name: str) -> None:
    """Refuses a port that something listens on.

    Raises:
        InvalidConfig: it is taken, or cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InvalidConfig(
                f"cannot listen on {host}:{port}: {error.strerror or error}", name
            ) from None
