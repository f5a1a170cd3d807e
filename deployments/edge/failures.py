"""The last net: whatever leaves the layers inside becomes an error body of OpenAI's form."""

import logging

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin.deployments.openai.errors import ClientGone, failure_response

logger = logging.getLogger("rayfin.http")


class Failures:
    """ASGI: answers every exception, as long as no answer has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception as error:
            if begun:  # the server breaks the connection off, which is all that is left to say
                raise
            if isinstance(error, ClientDisconnect):
                error = ClientGone()
            response = failure_response(error, scope.get("method", "GET"), scope["path"])
            await response(scope, receive, send)
