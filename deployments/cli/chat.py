"""``rayfin chat``: a conversation with a running server."""

import sys
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from rayfin.actors.errors import RayfinError, ServerError
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.cli.options import (
    SectionedCommand,
    build,
    sampling_options,
    server_options,
    values_of,
)

if TYPE_CHECKING:
    import httpx

SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "stop")
COMMANDS = "/clear starts a new conversation, /exit or Ctrl-D quits"
# A model's text may hold control characters, which a terminal would obey.
CONTROLS = dict.fromkeys([*(set(range(32)) - {9, 10}), *range(127, 160)])


@click.command(cls=SectionedCommand)
@server_options
@click.option("--system", metavar="TEXT", help="system message")
@click.option(
    "-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, and exit"
)
@sampling_options(SAMPLING, server=True)
def chat(
    url: str,
    api_key: str | None,
    model: str | None,
    system: str | None,
    quick: str | None,
    **settings: Any,
) -> int:
    """Chat with a running server.

    Sampling settings without a flag take the server's defaults.

    \b
    Example:
      rayfin chat --url http://127.0.0.1:8000/v1 -q "What is the capital of Italy?"
    """
    build(SamplingParams)  # reports invalid flags before anything is sent
    sampling = values_of(SamplingParams)

    import httpx

    from rayfin.deployments.bench.endpoint import client_settings, find_model

    with httpx.Client(**client_settings(url, api_key)) as client:
        conversation = Conversation(client, find_model(client, model), system, sampling)
        if quick is not None:
            _answer(conversation, quick)
            return 0
        return _talk(conversation)


def _talk(conversation: "Conversation") -> int:
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # gives input() line editing and a history

        print(f"{conversation.model}: {COMMANDS}.")
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return 0
        if text == "/exit":
            return 0
        if text == "/clear":
            conversation.start_over()
        elif text.startswith("/") and text[1:].isalpha():
            print(f"unknown command {text}: {COMMANDS}", file=sys.stderr)
        elif text:
            try:
                _answer(conversation, text)
            except RayfinError as error:
                print(f"rayfin: error: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print()  # ends the answer, not the conversation


def _answer(conversation: "Conversation", text: str) -> None:
    with closing(conversation.ask(text)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


class Conversation:
    """The messages so far with one model; a question that fails is not among them."""

    def __init__(
        self, client: "httpx.Client", model: str, system: str | None, sampling: dict[str, Any]
    ) -> None:
        self.model = model
        self._client = client
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self.start_over()

    def start_over(self) -> None:
        """Drops all messages but the system message."""
        self.messages = list(self._opening)

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yields the answer's pieces. An answer that the caller stops reading is kept so far.

        Raises:
            ServerError: the server cannot be reached, refuses, or breaks the stream off.
        """
        before = self.messages
        messages = [*before, {"role": "user", "content": text}]
        answer = {"role": "assistant", "content": ""}
        try:
            for piece in self._stream(messages):
                answer["content"] += piece
                self.messages = [*messages, answer]
                yield piece.translate(CONTROLS)
        except ServerError:
            self.messages = before
            raise

    def _stream(self, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        from rayfin.deployments.bench import endpoint

        body = endpoint.chat_body(self.model, messages, self._sampling)
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
                if data is not None and (text := endpoint.read_piece(data).text):
                    yield text
        raise ServerError(endpoint.BROKEN_OFF)
