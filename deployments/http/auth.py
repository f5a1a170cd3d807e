"""The API key, checked before any route sees the request."""

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.http.paths import ADMIN_PATHS

OPEN_PATHS = frozenset({"/health", "/live", "/ping"})  # what a balancer asks, and nothing else
ANTHROPIC_KEY = "x-api-key"  # where clients of Anthropic's put it


class BearerAuth:
    """ASGI: lets in what carries a key, and tells the routes whose it is (``state.tenant``).

    All paths need a key but the open ones, whole and as the router itself reads them: prefixes, and
    URLs put together from the Host header, have let strangers in elsewhere (CVE-2026-48746).

    Raises:
        HTTPException: 401 no key or a wrong one, 400 two of them.
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
            written = headers.getlist("authorization")
            written += [f"Bearer {key}" for key in headers.getlist(ANTHROPIC_KEY)]
            if len(written) > 1:
                raise HTTPException(400, "There are two keys: in Authorization or X-Api-Key.")
            tenant = self._keys.tenant(written[0] if written else "")
            if tenant is None:
                raise HTTPException(
                    401, "Incorrect or missing API key.", {"WWW-Authenticate": "Bearer"}
                )
            scope["state"] = {**scope.get("state", {}), "tenant": tenant}
        await self._app(scope, receive, send)


# The operator's key, which is none of the API's keys, nor opens what those open.


class AdminAuth:
    """ASGI: lets in to ``ADMIN_PATHS`` whoever carries an operator's key (``state.operator``).

    Raises:
        HTTPException: 401 no key or a wrong one.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and get_route_path(scope) in ADMIN_PATHS:
            written = Headers(scope=scope).getlist("authorization")
            operator = self._keys.tenant(written[0]) if len(written) == 1 else None
            if operator is None:
                raise _refusal()
            scope["state"] = {**scope.get("state", {}), "operator": operator}
        await self._app(scope, receive, send)


def require_operator(request: Request) -> str:
    """For every route of an operator's: closed, should the layer above be missing.

    Raises:
        HTTPException: 401 nobody has looked at a key.
    """
    operator: str | None = getattr(request.state, "operator", None)
    if operator is None:
        raise _refusal()
    return operator


def _refusal() -> HTTPException:
    return HTTPException(401, "Incorrect or missing admin key.", {"WWW-Authenticate": "Bearer"})
