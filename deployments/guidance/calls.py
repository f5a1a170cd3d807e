"""The rules for tool calls: grammars after single tokens, or one of the whole answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rayfin.actors.guidance import CallGrammar
from rayfin.deployments.guidance.grammar import Grammar
from rayfin.deployments.guidance.tool_choice import FunctionTool, ToolChoice
from rayfin.deployments.text.parsing.format import ToolFormat
from rayfin.deployments.text.tokenizer import Tokenizer

ToolGuidance = Literal["schema", "json", "off"]


@dataclass(slots=True, frozen=True)
class CallRules:
    """Fields of ``Guidance``, and what the parser of the answer must be given."""

    grammar: str = ""  # of the whole answer after its thought, with the answer's own form
    calls: CallGrammar | None = None  # with a free answer only
    forbidden: tuple[int, ...] = ()  # triggers that may not be sampled
    unenforced: tuple[str, ...] = ()  # paths of schema keywords
    forced: str = ""  # of OutputParser: "required", or the name of the function


def make_call_rules(
    format: ToolFormat | None,
    tools: Sequence[FunctionTool],
    choice: ToolChoice,
    tokenizer: Tokenizer,
    *,
    guidance: ToolGuidance = "json",
    answer: Grammar | None = None,
) -> CallRules:
    """Returns what holds an answer to the tools and the choice of a request.

    Args:
        format: the model's; None where none is known: forced calls are JSON, others are text.
        guidance: of calls that are free to be made. ``schema``: arguments follow their schema;
            ``json``: they are any object, but those of strict functions; ``off``: only strict
            functions and a limit on calls have rules.
        answer: the form of the answer where it is no call.

    Raises:
        InvalidRequest: a form beside a forced call, or a schema that cannot be enforced.
    """
    return CallRules(grammar="" if answer is None else answer.text)
