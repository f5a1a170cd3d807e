"""What an operator puts around the API: a path in front, middleware and routes by their names."""

import importlib
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.plugins import plugins, set_up_plugins


class RootPath:
    """ASGI: says under which path a proxy in front offers the API; routes are found without it."""

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._path}, receive, send)


class OperatorMiddleware:
    """ASGI: layers of the operator's, the first of ``paths`` innermost, as in vLLM.

    Raises:
        InvalidConfig: a path leads to nothing that is middleware.
    """

    def __init__(self, app: ASGIApp, paths: Sequence[str]) -> None:
        self._app = app
        for path in paths:
            self._app = load(path)(self._app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def add_own_routes(app: FastAPI, names: Sequence[str]) -> None:
    """Adds the routes of ``--plugin``, which need keys as all others do.

    Raises:
        InvalidConfig: one cannot be loaded, or has the path of a route that is there.
    """
    set_up_plugins(tuple(names))
    for add in plugins(names, "route"):
        before = len(app.router.routes)
        add(app)
        paths = [getattr(route, "path", "") for route in app.router.routes]
        if taken := set(paths[before:]) & set(paths[:before]):
            raise InvalidConfig(f"plugin route: there is a route {min(taken)} already", "plugin")


def check_middleware(paths: Sequence[str]) -> None:
    """Imports them all.

    Raises:
        InvalidConfig: a path leads to nothing that is middleware.
    """
    for path in paths:
        load(path)


def load(path: str) -> Any:
    """Returns what makes a layer of ``path``: a class, or a function (request, call_next).

    Raises:
        InvalidConfig: it leads to nothing such.
    """
    module, _, name = path.rpartition(".")
    try:
        layer = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidConfig(
            f"middleware {path!r} cannot be imported: {error}", "middleware"
        ) from None
    if inspect.isclass(layer):
        return layer
    if inspect.iscoroutinefunction(layer):
        return partial(BaseHTTPMiddleware, dispatch=layer)
    raise InvalidConfig(
        f"middleware {path!r} is neither a class nor an async function", "middleware"
    )
