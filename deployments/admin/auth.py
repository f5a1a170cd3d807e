"""The operator's key, which is none of the API's keys, nor opens what those open."""

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from rayfin.deployments.admin.paths import ADMIN_PATHS
from rayfin.deployments.edge.keys import ApiKeys


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
