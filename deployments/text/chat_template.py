"""Chat messages to token ids, through the model's chat template."""

import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import FrameType
from typing import Any, NamedTuple, TypeVar, cast

import jinja2
from pydantic_core import to_json

from rayfin.actors.errors import InvalidRequest, TemplateTooLong, TemplateTooSlow
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.timing import TEMPLATE_SECONDS
from rayfin.deployments.text.markers import Marked
from rayfin.deployments.text.messages import (
    ContentFormat,
    PlainTools,
    plain_messages,
    plain_tools,
    texts_in,
)
from rayfin.deployments.text.parsing.format import IdStyle, ToolFormat
from rayfin.deployments.text.repair import NO_RULES, TemplateRules, repaired
from rayfin.deployments.text.tokenizer import Tokenizer
from rayfin.deployments.text.written_tools import write_tools

OWN_NAMES = {
    *("messages", "raise_exception", "strftime_now"),
    *("dict", "namespace", "range", "lipsum", "cycler", "joiner"),
}
RENDERING_ERRORS = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError),
)
INSIDE = ("system", "developer", "assistant")  # roles whose tags keep their meaning
MAX_GROWTH = 4  # characters that a template renders for each one of the request ...
MAX_OWN_TEXT = 2**17  # ... and in addition to those
TEMPLATE_FILE = "<template>"  # Jinja's file name for a template from a string
LINES_PER_CHECK = 64  # reading the clock costs as much as several lines

T = TypeVar("T")


@cache
def reserved_names(kind: type) -> frozenset[str]:
    """Names that no variable of a request may have: those of a tokenizer's class and of jinja."""
    rendering: Any = getattr(kind, "apply_chat_template", None)
    return frozenset(OWN_NAMES | inspect.signature(rendering).parameters.keys()) - {"documents"}


class ThinkingSwitch(NamedTuple):
    """Variables by which a template thinks or does not, beside those that all templates get."""

    on: Mapping[str, Any] = {}
    off: Mapping[str, Any] = {}

    def added(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a request's variables with its own, which may name the effort "none"."""
        thinks = variables.get("enable_thinking", variables.get("thinking"))
        if thinks is None:
            return dict(variables)
        given = {name: value for name, value in variables.items() if value != "none"}
        return {**variables, **(self.on if thinks else self.off), **given}


@dataclass(slots=True, frozen=True)
class HistoryStyle:
    """How a template takes the contents and the tool calls of messages."""

    arguments_as_text: bool = False
    ids: IdStyle = "openai"
    content: ContentFormat = "string"
    rules: TemplateRules = NO_RULES
    calls: ToolFormat | None = None  # as they are written where the template has no place for tools


OBJECTS = HistoryStyle()


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    seconds: float = TEMPLATE_SECONDS,
    history: HistoryStyle = OBJECTS,
    media: MediaKind | None = None,
    marked: Marked | None = None,
) -> list[int]:
    """Returns the prompt of a conversation.

    Control tokens written inside messages or tools (``<|im_end|>``) become literal text; only the
    template itself opens and closes turns. Without any, the ids are exactly those of
    ``apply_chat_template``. Tags that a model writes itself in pairs (``<think>``, ``</think>``)
    keep their meaning inside messages, since an assistant's earlier turns hold them; unless a
    user's message, a tool's result or the arguments of a call hold one: then all are text.

    Args:
        chat_template: replaces the model's template; from the operator, or from a request that
            the operator trusts.
        variables: the template's further variables, from the request; what JSON can hold.
        seconds: of processor time, at most.
        history: how the template takes contents and earlier tool calls.
        media: what the model reads beside text; each has one token of its place in the ids.
        marked: whose messages these are: the ids have those of its parts.

    Raises:
        InvalidRequest: invalid messages, an error of the template, no template.
        TemplateTooSlow, TemplateTooLong: the template was stopped.
    """
    conversation = plain_messages(
        messages,
        arguments_as_text=history.arguments_as_text,
        id_style=history.ids,
        content=history.content,
        media=media,
    )
    extras = dict(variables or {})
    has_tags = _holds_tag(tokenizer, conversation, extras)  # before ours are written into it
    conversation, listed = _written(conversation, tools, history.calls)
    sent = _check_variables(extras, tokenizer)
    template = _template(tokenizer, chat_template, listed is not None)
    if add_generation_prompt and continue_final_message:
        raise InvalidRequest(
            "add_generation_prompt and continue_final_message exclude each other.",
            "continue_final_message",
        )
    conversation = _fitted(conversation, template, history.rules)
    texts = [*texts_in(conversation), *texts_in(extras)]
    inner = tokenizer.literal_inner if has_tags else tokenizer.inner
    if marked is not None:
        inner = marked.tokenizer(inner)
    render = partial(
        inner.apply_chat_template,
        conversation,
        tools=cast(list[Any] | None, listed),
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        sanitize_control_tokens=_holds_control_token(tokenizer, texts, listed) or has_tags,
        return_dict=False,
        **extras,
    )
    sent += sum(len(text) for text, _ in texts)
    if listed is not None:
        sent += listed.characters
    try:
        ids = watched(render, seconds, MAX_GROWTH * sent + MAX_OWN_TEXT)
    except jinja2.TemplateError as error:
        raise InvalidRequest(f"The chat template refuses this: {error}", "messages") from error
    except RENDERING_ERRORS as error:
        reason = str(error).partition("\n")[0]
        raise InvalidRequest(
            f"The chat template cannot render these messages: {reason}", "messages"
        ) from error
    return cast(list[int], ids)


def _written(
    conversation: list[dict[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    calls: ToolFormat | None,
) -> tuple[list[dict[str, Any]], PlainTools | None]:
    """Returns messages and tools as a template takes them: maybe the tools are in the messages."""
    listed = plain_tools(tools) if tools is not None else None
    return (
        (conversation, listed)
        if calls is None
        else (write_tools(conversation, listed, calls), None)
    )


def _fitted(
    conversation: list[dict[str, Any]], template: str, rules: TemplateRules
) -> list[dict[str, Any]]:
    """Gives roles and earlier thoughts the names that the template knows, and keeps its rules."""
    for message in conversation:
        if message["role"] == "developer" and "developer" not in template:
            message["role"] = "system"
        thought = message.get("reasoning_content")
        if thought is not None and ".thinking" in template and not message["content"]:
            message["thinking"] = thought
    return conversation if rules == NO_RULES else repaired(conversation, rules)[0]


def _template(tokenizer: Tokenizer, override: str | None, has_tools: bool) -> str:
    if override is not None:
        return override
    template = tokenizer.inner.chat_template
    if isinstance(template, dict):
        template = (template.get("tool_use") if has_tools else None) or template.get("default")
    if not template:
        raise InvalidRequest(
            "This model has no chat template. Use /v1/completions, or start the server with "
            "--chat-template.",
            "messages",
        )
    return str(template)


def _check_variables(variables: Mapping[str, Any], tokenizer: Tokenizer) -> int:
    """Returns the characters that the variables have as JSON."""
    path = "chat_template_kwargs"
    kind: Any = type(tokenizer.inner)
    reserved = reserved_names(kind)
    for name in variables:
        if name in reserved or name in tokenizer.inner.special_tokens_map:
            raise InvalidRequest(
                f"A request may not set {name}.", f"{path}.{name}", "unknown_parameter"
            )
    try:
        return len(to_json(variables))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"'{path}' must be JSON: {error}.", path, "invalid_type") from error


def _holds_control_token(
    tokenizer: Tokenizer, texts: Sequence[tuple[str, bool]], tools: PlainTools | None
) -> bool:
    """Whether one of ``texts``, as ``texts_in`` yields them, or of ``tools`` holds a control token.

    Raises:
        InvalidRequest: the key of an object holds one; keys cannot be made literal.
    """
    search = tokenizer.control_tokens.search
    in_value, in_key = (False, False) if tools is None else tools.find(tokenizer.control_tokens)
    for text, is_key in texts:
        if search(text):
            in_key |= is_key
            in_value = True
    if in_key:
        raise InvalidRequest(
            "The keys of tools, tool arguments, documents and template variables may not hold "
            "control tokens.",
            "tools",
        )
    return in_value


def _holds_tag(
    tokenizer: Tokenizer, conversation: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> bool:
    """Whether what a model has not written as text holds a tag that it writes itself."""
    search = tokenizer.paired_tags.search
    if any(search(text) for text, _ in texts_in(variables.get("documents", ()))):
        return True
    for message in conversation:
        outside = message["role"] not in INSIDE
        if outside and any(search(text) for text, _ in texts_in(message["content"])):
            return True
        if any(search(text) for text, _ in texts_in(message.get("tool_calls", ()))):
            return True
    return False


def watched(render: Callable[[], T], seconds: float, characters: int) -> T:
    """Returns what ``render`` returns; runs it in this thread, within limits.

    Templates come with models. Their sandbox keeps them from the system, not from loops: two nested
    ``range(99999)`` take minutes. Python code cannot be stopped from outside, so a trace function
    sees every line of the template, and no other line.

    Args:
        seconds: of processor time, so that a busy machine does not count against a template.
        characters: of output, at most.

    Raises:
        TemplateTooSlow, TemplateTooLong: the template was stopped.
    """
    deadline = time.thread_time() + seconds
    lines, written = 0, 0

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_line if frame.f_code.co_filename == TEMPLATE_FILE else None

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines, written
        if event == "line":
            lines += 1
            if not lines % LINES_PER_CHECK and time.thread_time() > deadline:
                raise TemplateTooSlow(
                    f"The chat template takes more than {seconds:g} s for these messages.",
                    "messages",
                )
        elif event == "return" and isinstance(arg, str):  # a template yields what it writes
            written += len(arg)
            if written > characters:
                raise TemplateTooLong(
                    f"The chat template writes more than {characters} characters for these "
                    "messages.",
                    "messages",
                )
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        return render()
    finally:
        sys.settrace(before)
