"""A chat's history, and the stream of its next answer."""

from collections.abc import Generator
from typing import Any

import httpx

from rayfin.actors.errors import ServerError
from rayfin.deployments.bench.endpoint import BROKEN_OFF, chat_body, describe, read_event, refusal


class Conversation:
    """The messages so far with one model; a failed question leaves no trace in them."""

    def __init__(
        self, client: httpx.Client, model: str, system: str | None, sampling: dict[str, Any]
    ) -> None:
        self.model = model
        self._client = client
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self._opening)

    def ask(self, text: str) -> Generator[str, None, None]:
        """The answer's pieces as they come; one that is left early is kept as far as it came.

        Raises:
            ServerError: the server is gone, refused, or broke off.
        """
        before = self.messages
        asked = [*before, {"role": "user", "content": text}]
        answer = {"role": "assistant", "content": ""}
        try:
            for piece in self._stream(asked):
                answer["content"] += piece
                self.messages = [*asked, answer]
                yield piece.translate(CONTROLS)
        except ServerError:
            self.messages = before
            raise

    def _stream(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        body = chat_body(self.model, messages, self._sampling)
        try:
            with self._client.stream("POST", "/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                    raise refusal(response)
                for line in response.iter_lines():
                    piece = read_event(line)
                    if piece is not None and piece.done:
                        return
                    if piece is not None and piece.text:
                        yield piece.text
        except httpx.HTTPError as error:
            raise ServerError(describe(error)) from None
        raise ServerError(BROKEN_OFF)


# A model's text may hold control characters, and a terminal obeys them.
CONTROLS = dict.fromkeys([*(set(range(32)) - {9, 10}), *range(127, 160)])
