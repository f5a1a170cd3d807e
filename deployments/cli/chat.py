"""``rayfin chat``: a conversation with a running server."""

import sys
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from rayfin.actors.errors import RayfinError
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.cli.options import (
    SectionedCommand,
    build,
    sampling_options,
    server_options,
    values_of,
)

if TYPE_CHECKING:
    from rayfin.deployments.bench.conversation import Conversation

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

    from rayfin.deployments.bench.conversation import Conversation
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
