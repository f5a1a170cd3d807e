"""A conversation with a model of a server."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rayfin.actors.errors import ServerError

if TYPE_CHECKING:
    import httpx

    from rayfin.deployments.bench.endpoint import StreamPiece

# A model's text may hold control characters, which a terminal would obey.
CONTROLS = dict.fromkeys([*(set(range(32)) - {9, 10}), *range(127, 160)])


class Conversation:
    """The messages so far with one model; a question that fails is not among them."""

    def __init__(
        self, client: "httpx.Client", model: str, system: str | None, sampling: dict[str, Any]
    ) -> None:
        self.model = model
        self.system = system
        self.sampling = sampling
        self.messages: list[dict[str, str]] = []
        self._client = client

    def start_over(self) -> None:
        """Drops all messages but the system message."""
        self.messages = []

    def last_question(self) -> str | None:
        """Takes the last question and its answer back; returns the question, None without one."""
        while self.messages:
            message = self.messages[-1]
            self.messages = self.messages[:-1]
            if message["role"] == "user":
                return message["content"]
        return None

    def with_system(self) -> list[dict[str, str]]:
        """The messages as they are sent."""
        opening = [{"role": "system", "content": self.system}] if self.system else []
        return [*opening, *self.messages]

    def ask(self, text: str) -> Iterator["StreamPiece"]:
        """Yields the answer's pieces. An answer that the caller stops reading is kept so far.

        Raises:
            ServerError: the server cannot be reached, refuses, or breaks the stream off.
        """
        before = self.messages
        question, answer = {"role": "user", "content": text}, {"role": "assistant", "content": ""}
        self.messages = [*before, question]
        sent = self.with_system()
        try:
            for piece in self._stream(sent):
                answer["content"] += piece.text
                self.messages = [*before, question, answer]
                piece.text = piece.text.translate(CONTROLS)
                piece.reasoning = piece.reasoning.translate(CONTROLS)
                yield piece
        except ServerError:
            self.messages = before
            raise
        finally:
            if self.messages[-1:] == [question]:  # stopped before the answer's first piece
                self.messages = before

    def _stream(self, messages: list[dict[str, str]]) -> Iterator["StreamPiece"]:
        from rayfin.deployments.bench import endpoint

        body = endpoint.chat_body(self.model, messages, self.sampling)
        with (
            endpoint.connection_errors(),
            self._client.stream("POST", "/chat/completions", json=body) as response,
        ):
            if response.is_error:
                response.read()
                raise endpoint.refusal(response)
            for line in response.iter_lines():
                if (data := endpoint.event_data(line)) == endpoint.DONE:
                    return
                if data is not None:
                    yield endpoint.read_piece(data)
        raise ServerError(endpoint.BROKEN_OFF)
