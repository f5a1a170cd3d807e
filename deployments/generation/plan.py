"""How the answers of one request are guided and read."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from rayfin.actors.guidance import Guidance
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.tool_choice import FunctionTool, ToolChoice

if TYPE_CHECKING:
    from rayfin.deployments.text.parsing.parser import OutputParser

    from rayfin.deployments.generation.service import OpenAIService

UNENFORCED = "x-rayfin-unenforced"
LONGEST_HEADER = 4096  # bytes; proxies refuse the headers of an answer beyond 8 KiB or so


@dataclass(slots=True, frozen=True)
class AnswerRules:
    """What a request says of the form of its answers, whatever the API."""

    tools: tuple[FunctionTool, ...] = ()
    choice: ToolChoice = ToolChoice()
    structured: StructuredOutputs | None = None
    structured_param: str = "response_format"  # its path in the request, for errors
    budget: int | None = None  # tokens of a thought
    budget_param: str = "thinking_token_budget"


@dataclass(slots=True, frozen=True)
class OutputPlan:
    """Made by an API's adapter, after the warden has checked the grammars."""

    guidance: Guidance | None = None  # of all choices
    make_parser: "Callable[[], OutputParser] | None" = None  # a parser for each choice
    unenforced: tuple[str, ...] = ()  # paths of schema keywords, for x-rayfin-unenforced
    id_style: str = ""  # of call ids: "" (OpenAI's), "mistral" or "kimi"
    earlier_calls: int = 0  # in the conversation, counted by ids of the style "kimi"
    choice: ToolChoice = ToolChoice()
    reasons: bool = False  # the model's reasoning is known, so that its tokens are counted

    def parser(self) -> "OutputParser | None":
        """Returns a new parser; None if answers are plain text."""
        return None if self.make_parser is None else self.make_parser()

    @property
    def headers(self) -> dict[str, str]:
        """Of the reply: what of the request's schemas is not enforced, as percent-encoded paths.

        Paths that do not fit are left out, and "..." is the last one.
        """
        paths = [quote(path, safe="/$.[]@:~") for path in self.unenforced]
        kept: list[str] = []
        for path in paths:
            if sum(map(len, kept)) + 2 * len(kept) + len(path) > LONGEST_HEADER:
                kept.append("...")
                break
            kept.append(path)
        return {UNENFORCED: ", ".join(kept)} if kept else {}


NO_PLAN = OutputPlan()


async def plan_answers(
    service: "OpenAIService", rules: AnswerRules, opening: str, *, earlier_calls: int = 0
) -> OutputPlan:
    """Returns the plan of a chat's answers; its grammars are checked.

    Args:
        opening: what the template puts into the model's mouth (``ChatPrompt.opening``): whether
            an answer starts inside a thought is read from it alone.
        earlier_calls: tool calls in the conversation.

    Raises:
        InvalidRequest: a field that this model cannot follow, or a grammar that is refused.
    """
    return NO_PLAN
