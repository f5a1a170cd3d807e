"""Sends one line of a batch to its endpoint, again where that helps."""

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import suppress

import httpx

from rayfin.actors.errors import ServerError
from rayfin.actors.timing import BATCH_PAUSE_SECONDS, BATCH_SILENCE_SECONDS
from rayfin.deployments.batches.answers import LineAnswer
from rayfin.deployments.batches.lines import Line

BUSY = frozenset({408, 429, 503})
"""Statuses that say nothing of a line: it is sent again, as often as it takes."""

NO_TIMEOUT = httpx.Timeout(30.0, read=None, pool=None)
"""A request of a batch may wait for as long as others are before it."""

REQUEST_ID = "x-request-id"
MAX_FAILURES = 3
"""A line whose answers are 5xx is sent so often; then the last of them is its answer."""


class LineSender:
    """Sends lines through an HTTP client, whose transport may be an application in this process.

    Args:
        batch: what seeds are made of, beside the line's custom_id.
        patience: seconds without any answer of the server after which ``send`` gives up; None:
            never.
        say: hears why nothing is taken, once in each longer silence.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        batch: str = "",
        headers: Mapping[str, str] | None = None,
        patience: float | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._client = client
        self._batch = batch
        self._headers = dict(headers or {})
        self._patience = patience
        self._heard = asyncio.get_running_loop().time()
        self._say = say
        self._said = False
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Lines that wait to be sent again are given up; those that are sent are answered."""
        self._stopped.set()

    async def send(self, line: Line) -> LineAnswer:
        """Returns the line's answer.

        Raises:
            ServerError: the server has not answered for ``patience`` seconds, or before ``stop``.
        """
        failures = attempts = 0
        while True:
            try:
                response = await self._client.post(
                    line.url, json=line.prepared(self._batch), headers=self._headers
                )
            except (httpx.TransportError, httpx.InvalidURL) as error:
                self._check_patience(f"{type(error).__name__}: {error}")
                response = None
            except ValueError as error:  # what JSON cannot hold: NaN
                return _refused(line, str(error))
            if response is not None:
                status = response.status_code
                if status in BUSY:
                    self._check_patience(response.text[:200])
                else:
                    self._heard, self._said = asyncio.get_running_loop().time(), False
                    failures += status >= 500
                    if status < 500 or failures == MAX_FAILURES:
                        return _answer(line, response)
            attempts += 1
            await self._wait(_pause(attempts, response))

    async def _wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopped.wait(), seconds)
        if self._stopped.is_set():
            raise ServerError("the server took no request until the run was stopped")

    def _check_patience(self, why: str) -> None:
        silent = asyncio.get_running_loop().time() - self._heard
        if self._patience is not None and silent > self._patience:
            raise ServerError(f"the server has taken no request for {silent:.0f} s: {why}")
        if self._say is not None and not self._said and silent > BATCH_SILENCE_SECONDS:
            self._said = True
            self._say(f"The server takes no request ({why}); lines are sent again.")


def _pause(attempts: int, response: httpx.Response | None) -> float:
    first, longest = BATCH_PAUSE_SECONDS
    seconds = min(longest, first * 2.0 ** min(attempts - 1, 16))
    after = response.headers.get("retry-after", "") if response is not None else ""
    if after.isdecimal():
        seconds = min(longest, max(seconds, float(after)))
    return seconds * random.uniform(0.5, 1.0)


def _answer(line: Line, response: httpx.Response) -> LineAnswer:
    try:
        body = response.json()
    except ValueError:
        body = response.text
    request_id = response.headers.get(REQUEST_ID, "")
    return LineAnswer(line.custom_id, line.number, response.status_code, request_id, body)


def _refused(line: Line, why: str) -> LineAnswer:
    error = {"code": "invalid_line", "message": f"The body is no JSON: {why[:200]}"}
    return LineAnswer(line.custom_id, line.number, error=error)
