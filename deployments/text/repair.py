"""One repair of messages, for chat templates that refuse some orders of them.

A template's rules are found out once, by rendering (``parsing/template_probe.py``), and the repair
follows from them and the messages alone: what begins equal stays equal, for the prefix cache.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import takewhile
from typing import Any

REPAIRED = "x-rayfin-messages-repaired"  # a header of answers
SYSTEM = ("system", "developer")
END = {"role": ""}  # behind the last message
Messages = list[dict[str, Any]]


@dataclass(slots=True, frozen=True)
class TemplateRules:
    """What a chat template refuses."""

    system_first: bool = False  # one system message, before all others
    no_system: bool = False
    no_results: bool = False  # messages of tools
    no_user_after_results: bool = False
    alternates: bool = False  # users and assistants take turns
    one_call: bool = False  # in a message


NO_RULES = TemplateRules()


def repaired(
    messages: Sequence[Mapping[str, Any]], rules: TemplateRules
) -> tuple[Messages, list[str]]:
    """Returns messages that keep the rules, and the names of what was changed for that.

    Parts of contents keep their order. What no rule forbids stays as it is.

    Args:
        messages: whose shape is checked.
    """
    named: list[str] = []
    result = [dict(message) for message in messages]
    for (name, repair), is_kept in zip(STEPS, astuple(rules), strict=True):
        if not is_kept:
            continue
        before, result = result, repair(result)
        if result != before:
            named.append(name)
    return result, list(dict.fromkeys(named))


def joined(*messages: Mapping[str, Any]) -> dict[str, Any]:
    """Returns messages of one role as one; texts before the first parts are joined by newlines."""
    whole = dict(messages[0])
    for name in ("reasoning_content", "reasoning", "content"):
        given = [message[name] for message in messages if message.get(name)]
        texts = list(takewhile(lambda text: isinstance(text, str), given))
        begun = ["\n".join(texts)] if texts else []
        if rest := given[len(texts) :]:
            whole[name] = [part for text in [*begun, *rest] for part in as_parts(text)]
        elif texts:
            whole[name] = begun[0]
    callers = messages if whole["role"] == "assistant" else ()  # others' calls are not checked
    if calls := [call for message in callers for call in message.get("tool_calls") or ()]:
        whole["tool_calls"] = calls
    return whole


def as_parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _one_system(messages: Messages) -> Messages:
    """Joins the leading system messages; later ones become users' turns in their places."""
    leading = list(takewhile(_is_system, messages))
    rest = [_as_user(message) for message in messages[len(leading) :]]
    return [*merged(leading, lambda first, said: True), *rest]


def _no_system(messages: Messages) -> Messages:
    return [_as_user(message) for message in messages]


def _no_results(messages: Messages) -> Messages:
    return [
        {"role": "user", "content": message.get("content") or ""}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def _after_results(messages: Messages) -> Messages:
    """Puts what a user says behind a tool's result to that result."""
    return merged(messages, lambda first, said: (first["role"], said["role"]) == ("tool", "user"))


def _alternate(messages: Messages) -> Messages:
    def goes_on(first: dict[str, Any], said: dict[str, Any]) -> bool:
        return bool(first["role"] == said["role"] and first["role"] in ("user", "assistant"))

    return merged(messages, goes_on)


def _one_call(messages: Messages) -> Messages:
    """Gives each call a message of its own, with its result behind it, in the results' order."""
    result: Messages = []
    caller: dict[str, Any] = {}
    results: Messages = []  # behind it
    for message in [*messages, END]:
        if message["role"] == "tool":
            results.append(message)
            continue
        result += _calls_apart(caller, results) if caller else results
        is_caller = message["role"] == "assistant" and len(message.get("tool_calls") or ()) > 1
        caller, results = (message, []) if is_caller else ({}, [message])
    return result


def _calls_apart(message: dict[str, Any], results: Messages) -> Iterator[dict[str, Any]]:
    waiting = list(message["tool_calls"])  # several may have one id
    caller = message
    for said in [*results, *([None] * len(waiting))]:
        for call in waiting:
            if said is None or call.get("id") == said.get("tool_call_id"):
                waiting.remove(call)
                yield {**caller, "tool_calls": [call]}
                caller = {"role": "assistant", "content": ""}
                break
        if said is not None:
            yield said


STEPS: tuple[tuple[str, Callable[[Messages], Messages]], ...] = (  # as TemplateRules' fields
    ("system", _one_system),
    ("system", _no_system),
    ("results", _no_results),
    ("results", _after_results),
    ("turns", _alternate),
    ("calls", _one_call),
)


def merged(
    messages: Messages, goes_on: Callable[[dict[str, Any], dict[str, Any]], bool]
) -> Messages:
    """Returns messages with neighbours joined.

    Args:
        goes_on: whether what the first of some neighbours has begun takes a message in.
    """
    groups: list[Messages] = []
    for message in messages:
        if groups and goes_on(groups[-1][0], message):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [group[0] if len(group) == 1 else joined(*group) for group in groups]


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in SYSTEM


def _as_user(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "user"} if _is_system(message) else message
