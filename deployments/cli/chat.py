"""``rayfin chat``: a conversation with a running server."""

import sys
from collections.abc import Generator
from contextlib import closing
from typing import Any

import click
import httpx

from rayfin.actors.errors import RayfinError, ServerError
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.bench.endpoint import BROKEN_OFF, chat_body, describe, read_event, refusal
from rayfin.deployments.cli.options import (
    SectionedCommand,
    build,
    sampling_options,
    server_options,
    values_of,
)

SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "stop")
COMMANDS = "/clear forgets the conversation, /exit or Ctrl-D leaves"


@click.command(cls=SectionedCommand)
@server_options
@click.option("--system", metavar="TEXT", help="the system message")
@click.option("-q", "--quick", metavar="MESSAGE", help="ask once, print the answer, and leave")
@sampling_options(SAMPLING, server=True)
def chat(
    url: str,
    api_key: str | None,
    model: str | None,
    system: str | None,
    quick: str | None,
    **settings: Any,
) -> int:
    """Talk to a running server.

    What no flag sets, the server decides.

    \b
    Example:
      rayfin chat --url http://127.0.0.1:8000/v1 -q "What is the capital of Italy?"
    """
    build(SamplingParams)  # a wrong flag shows before anything is asked
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
        import readline  # noqa: F401  # input() then edits lines and remembers them

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
            conversation.clear()
        elif text.startswith("/") and text[1:].isalpha():
            print(f"no command {text}: {COMMANDS}", file=sys.stderr)
        elif text:
            try:
                _answer(conversation, text)
            except RayfinError as error:
                print(f"rayfin: error: {error}", file=sys.stderr)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                print()  # the answer is cut here; the conversation goes on


def _answer(conversation: "Conversation", text: str) -> None:
    with closing(conversation.ask(text)) as pieces:
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


# A chat's history, and the stream of its next answer.

# A model's text may hold control characters, and a terminal obeys them.
CONTROLS = dict.fromkeys([*(set(range(32)) - {9, 10}), *range(127, 160)])


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
