"""API keys and operators' keys, checked before any route sees the request."""

import re

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.paths import ADMIN_PATHS

OPEN_PATHS = frozenset({"/health", "/live", "/ping"})  # probes of load balancers
BEARER = re.compile(r"bearer +[^ ]", re.IGNORECASE)
ANTHROPIC_KEY = "x-api-key"  # the header of Anthropic's clients


class BearerAuth:
    """ASGI: requires an API key, and sets ``state.tenant`` to the tenant that it belongs to.

    A bearer token counts before ``X-Api-Key``: gateways and older SDKs of Anthropic's send both.
    Every path needs a key except the open ones. Open paths are compared whole, as the router reads
    them: prefixes, and URLs built from the Host header, let strangers in elsewhere
    (CVE-2026-48746).

    Raises:
        HTTPException: 401 no key or a wrong one, 400 two keys in headers of one name.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and get_route_path(scope) not in self._open_paths:
            headers = Headers(scope=scope)
            bearers = [*filter(BEARER.match, headers.getlist("authorization"))]
            others = [f"Bearer {key}" for key in headers.getlist(ANTHROPIC_KEY) if key.strip()]
            if max(len(bearers), len(others)) > 1:
                raise HTTPException(400, "There are two keys in headers of one name.")
            tenant = self._keys.tenant((bearers or others or [""])[0])
            if tenant is None:
                raise HTTPException(
                    401, "Incorrect or missing API key.", {"WWW-Authenticate": "Bearer"}
                )
            scope["state"] = {**scope.get("state", {}), "tenant": tenant}
        await self._app(scope, receive, send)


class AdminAuth:
    """ASGI: requires an operator's key on ``paths``, and sets ``state.operator``.

    Operators' keys are separate from API keys: neither opens what the other does.

    Args:
        clients: API keys, which get 403: they are known, and do not open these paths.

    Raises:
        HTTPException: 401 no key or a wrong one, 403 an API key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        paths: frozenset[str] = ADMIN_PATHS,
        clients: ApiKeys | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._paths = paths
        self._clients = clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and get_route_path(scope) in self._paths:
            written = Headers(scope=scope).getlist("authorization")
            operator = self._keys.tenant(written[0]) if len(written) == 1 else None
            if operator is None:
                if self._is_client(written):
                    raise HTTPException(403, "An API key opens no operators' routes.")
                raise _refusal()
            scope["state"] = {**scope.get("state", {}), "operator": operator}
        await self._app(scope, receive, send)

    def _is_client(self, written: list[str]) -> bool:
        known = self._clients
        return known is not None and len(written) == 1 and known.tenant(written[0]) is not None


def require_operator(request: Request) -> str:
    """A dependency of every operator's route, which stays closed if ``AdminAuth`` is missing.

    Raises:
        HTTPException: 401 no layer has checked a key.
    """
    operator: str | None = getattr(request.state, "operator", None)
    if operator is None:
        raise _refusal()
    return operator


def _refusal() -> HTTPException:
    return HTTPException(401, "Incorrect or missing admin key.", {"WWW-Authenticate": "Bearer"})
