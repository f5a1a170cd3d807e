"""``rayfin chat``: a conversation with a running server."""

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import click

from rayfin.actors.errors import InvalidConfig, InvalidRequest, RayfinError
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.cli.conversation import Conversation
from rayfin.deployments.cli.options import (
    SectionedCommand,
    build,
    sampling_options,
    server_options,
    values_of,
)
from rayfin.deployments.cli.screen import MarkdownScreen, PlainScreen

SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "stop")
QUOTES = '"""'


@click.command(cls=SectionedCommand)
@server_options
@click.option("--system", metavar="TEXT", help="system message")
@click.option(
    "-q", "--quick", metavar="MESSAGE", help="send one message, print the answer, and exit"
)
@click.option(
    "--plain", is_flag=True, help="print answers as they come, not as Markdown on a terminal"
)
@sampling_options(SAMPLING, server=True)
def chat(
    url: str,
    api_key: str | None,
    model: str | None,
    system: str | None,
    quick: str | None,
    plain: bool,
    **settings: Any,
) -> int:
    """Chat with a running server.

    Sampling settings without a flag take the server's defaults. /help lists the commands of a
    conversation. Ctrl-C ends an answer, Ctrl-D the program.

    \b
    Example:
      rayfin chat --url http://127.0.0.1:8000/v1 -q "What is the capital of Italy?"
    """
    build(SamplingParams)  # reports invalid flags before anything is sent
    sampling = values_of(SamplingParams)

    import httpx

    from rayfin.deployments.bench.endpoint import client_settings, find_model

    screen = PlainScreen() if plain or not sys.stdout.isatty() else MarkdownScreen()
    with httpx.Client(**client_settings(url, api_key)) as client:
        talk = Talk(Conversation(client, find_model(client, model), system, sampling), screen)
        if quick is not None:
            talk.answer(quick)
            return 0
        return talk.run()


class ChatCommand(NamedTuple):
    """What a line that starts with a slash does; ``run`` takes the rest of the line."""

    usage: str
    help: str
    run: "Callable[[Talk, str], None]"


class Talk:
    """Reads lines, and answers or obeys them."""

    def __init__(self, conversation: Conversation, screen: PlainScreen | MarkdownScreen) -> None:
        self.conversation = conversation
        self.screen = screen
        self.over = False
        self._interactive = sys.stdin.isatty()

    def run(self) -> int:
        """Returns at /exit or the end of the input."""
        if self._interactive:
            import readline  # noqa: F401  # gives input() line editing and a history

            self.screen.note(f"{self.conversation.model}: /help lists commands, Ctrl-D quits.")
        while not self.over:
            try:
                text = self._read()
            except EOFError:
                if self._interactive:
                    print()
                break
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print()  # drops the line
                continue
            if text:
                self._obey(text)
        return 0

    def _read(self) -> str:
        """A line, or several between two lines of three quotation marks."""
        text = input("> " if self._interactive else "").strip()
        if not text.startswith(QUOTES):
            return text
        lines = [text.removeprefix(QUOTES)]
        while QUOTES not in lines[-1]:
            lines.append(input(". " if self._interactive else ""))
        lines[-1] = lines[-1].partition(QUOTES)[0]
        return "\n".join(lines).strip()

    def _obey(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        try:
            if not text.startswith("/") or not name.isalpha():
                self.answer(text)
            elif name in COMMANDS:
                COMMANDS[name].run(self, rest.strip())
            else:
                self.screen.note(f"unknown command /{name}: /help lists the commands")
        except RayfinError as error:
            print(f"rayfin: error: {error}", file=sys.stderr)
        except OSError as error:
            print(f"rayfin: error: {error.filename}: {error.strerror}", file=sys.stderr)
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            print()  # ends the answer, not the conversation

    def answer(self, text: str) -> None:
        """Asks and shows the answer."""
        with closing(self.conversation.ask(text)) as pieces:  # type: ignore[type-var]
            self.screen.answer(pieces)

    def help(self, rest: str) -> None:
        """Lists the commands."""
        for command in COMMANDS.values():
            self.screen.note(f"{command.usage:22} {command.help}")
        self.screen.note(f"{QUOTES:22} starts and ends a message of several lines")

    def clear(self, rest: str) -> None:
        """Starts a new conversation."""
        self.conversation.start_over()
        self.screen.note("A new conversation.")

    def system(self, rest: str) -> None:
        """Shows, sets or removes the system message."""
        if rest:
            self.conversation.system = None if rest == "-" else rest
        self.screen.note(f"system message: {self.conversation.system or 'none'}")

    def set(self, rest: str) -> None:
        """Shows or sets sampling parameters."""
        name, _, value = rest.partition(" ")
        sampling = dict(self.conversation.sampling)
        if name and name not in SAMPLING:
            raise InvalidConfig(f"there is no {name}; there are {', '.join(SAMPLING)}")
        if name:
            sampling.pop(name, None)
            if value:
                sampling[name] = _value(name, value)
            try:
                SamplingParams(**sampling)
            except (InvalidRequest, TypeError) as error:
                raise InvalidConfig(str(error)) from None
            self.conversation.sampling = sampling
        parts = ", ".join(f"{name} {value}" for name, value in sampling.items())
        self.screen.note(parts or "all as the server has them")

    def retry(self, rest: str) -> None:
        """Asks the last question again."""
        question = self.conversation.last_question()
        if question is None:
            self.screen.note("There is no question yet.")
        else:
            self.answer(question)

    def save(self, rest: str) -> None:
        """Writes the messages to a file."""
        if not rest:
            raise InvalidConfig("/save needs the name of a file")
        text = json.dumps(self.conversation.with_system(), indent=2, ensure_ascii=False)
        Path(rest).expanduser().write_text(text + "\n", encoding="utf-8")
        self.screen.note(f"{len(self.conversation.messages)} messages are in {rest}")

    def exit(self, rest: str) -> None:
        """Leaves."""
        self.over = True


def _value(name: str, text: str) -> Any:
    """A parameter's value: a number, or a text for the stop string."""
    if name == "stop":
        return [text]
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidConfig(f"{name} must be a number, got {text}") from None


COMMANDS = {
    "help": ChatCommand("/help", "this list", Talk.help),
    "clear": ChatCommand("/clear", "start a new conversation", Talk.clear),
    "system": ChatCommand(
        "/system [TEXT]", "show or set the system message; - is none", Talk.system
    ),
    "set": ChatCommand("/set [NAME [VALUE]]", "show, set or unset a sampling parameter", Talk.set),
    "retry": ChatCommand("/retry", "ask the last question again", Talk.retry),
    "save": ChatCommand("/save FILE", "write the messages to a JSON file", Talk.save),
    "exit": ChatCommand("/exit, Ctrl-D", "leave", Talk.exit),
}
