"""The tools that a request declares, of all kinds and APIs, as functions.

Templates, grammars and parsers know functions only. The form of an API writes each of its tools as
a function, and its adapter names calls as the client knows them (``Tool.called``).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from pydantic_core import to_json

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.lark_pattern import pattern_of_lark, pattern_of_regex
from rayfin.deployments.text.checks import (
    MAX_NAME,
    as_choice,
    as_list,
    as_name,
    as_object,
    as_string,
    required,
)
from rayfin.deployments.text.messages import (
    INPUT,
    MAX_CALL_NAME,
    MAX_TOOLS,
    PlainTools,
    plain_tools,
)

MAX_TOOLS_SIZE = 256 * 1024  # characters of JSON
MAX_LARK = 16  # grammars of a request: one takes the event loop up to 50 ms
KNOWN_TOOLS = 64  # lists of tools that were read lately: an agent sends its own each time
SEARCH = "tool_search"
"""The type and the name of the client's search for tools."""

MAX_FLAT_NAME = 128  # characters of a tool's name in Responses, and of a namespace's
ToolKind = Literal["function", "custom", "search", "unserved"]
"""custom: a function of one text; search: one by which the client finds tools; unserved: none."""

HOSTED = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "computer", "mcp"),
    *("local_shell", "shell", "apply_patch", "programmatic", "tool_search"),
    *("web_fetch", "code_execution", "text_editor", "bash", "memory", "advisor"),
)
"""Beginnings of the types of tools that are OpenAI's or Anthropic's own."""


@dataclass(slots=True, frozen=True, eq=False)
class Tool:
    """A function that the model may call. The same tools give the same objects while known."""

    name: str  # for templates and parsers: with its namespace
    parameters: Mapping[str, Any] = field(default_factory=dict)  # a JSON schema; {} if none
    strict: bool = False  # its arguments are held to the schema, with ``auto`` as well
    path: str = ""  # of its schema in the request, for errors: tools[0].function.parameters
    kind: ToolKind = "function"
    pattern: str = ""  # of a custom tool's text, in llguidance's dialect; "" is any text
    called: str = ""  # its name for the client, within its namespace; "" is ``name``
    namespace: str = ""
    deferred: bool = False  # templates do not see it


@dataclass(slots=True, frozen=True)
class WrittenTool:
    """A tool as a function of a chat, unchecked."""

    function: Mapping[str, Any]  # {"type": "function", "function": ...}
    path: str  # of the tool
    schema: str  # behind that path, of what calls are held to
    kind: ToolKind = "function"
    pattern: str = ""
    called: str = ""
    namespace: str = ""
    deferred: bool = False


ToolForm = Callable[[Sequence[Any]], list[WrittenTool]]
"""Reads the tools of an API."""


@dataclass(slots=True, frozen=True, eq=False)
class DeclaredTools:
    """The tools of a request. The same tools give the same object while known."""

    functions: tuple[Tool, ...] = ()  # as answers are held to them
    shown: PlainTools | None = None  # as a chat template reads them; None if there are none
    left_out: tuple[str, ...] = ()  # types of tools that are not served

    def ignored_fields(self) -> list[str]:
        return [f"tools.{kind}" for kind in dict.fromkeys(self.left_out)]


NO_TOOLS = DeclaredTools()


def flat_name(name: str, namespace: str | None) -> str:
    """Returns the name of a tool for templates and parsers."""
    if not namespace:
        return name
    return namespace + ("" if namespace.endswith("__") else "__") + name


def chat_tools(tools: Sequence[Any]) -> list[WrittenTool]:
    """Reads the tools of a chat completion, and of ``LLM.chat``."""
    entries = []
    for i, written in enumerate(tools):
        path = f"tools[{i}]"
        tool = as_object(written, path)
        kind = as_string(required(tool, "type", path), f"{path}.type")
        if kind == "custom":
            custom = as_object(required(tool, "custom", path), f"{path}.custom")
            name = as_name(required(custom, "name", f"{path}.custom"), f"{path}.custom.name")
            entries.append(_custom(custom, name, "", path, ".custom.format", "grammar"))
        elif kind == "function":
            entries.append(WrittenTool(tool, path, ".function.parameters"))
        else:
            entries.append(WrittenTool({}, path, "", "unserved", called=kind))
    return entries


def flat_tools(tools: Sequence[Any]) -> list[WrittenTool]:
    """Reads the tools of Responses: their members stand beside the type, namespaces hold tools.

    ``defer_loading`` has an effect where the client searches; without a search it has none.
    """
    searched = any(isinstance(tool, Mapping) and _is_search(tool) for tool in tools)
    return _flat(tools, "tools", "", searched)


def _is_search(tool: Mapping[str, Any]) -> bool:
    """Returns whether it is a search for tools that the client runs."""
    return tool.get("type") == SEARCH and tool.get("execution") == "client"


def _flat(tools: Sequence[Any], at: str, namespace: str, searched: bool) -> list[WrittenTool]:
    entries: list[WrittenTool] = []
    for i, written in enumerate(tools):
        path = f"{at}[{i}]"
        tool = as_object(written, path)
        kind = as_string(required(tool, "type", path), f"{path}.type")
        if kind not in ("namespace", "custom", "function") and not _is_search(tool):
            entries.append(WrittenTool({}, path, "", "unserved", called=kind))
            continue
        name = SEARCH if kind == SEARCH else required(tool, "name", path)
        name = as_name(name, f"{path}.name", MAX_FLAT_NAME)
        if kind == "namespace":
            inner = as_list(required(tool, "tools", path), f"{path}.tools", MAX_TOOLS)
            entries += _flat(inner, f"{path}.tools", flat_name(name, namespace), searched)
            continue
        deferred = searched and tool.get("defer_loading") is True
        if kind == "custom":
            entries.append(_custom(tool, name, namespace, path, ".format", "", deferred))
            continue
        members = ("description", "parameters", "strict")
        function = {"name": flat_name(name, namespace)}
        function |= {key: tool[key] for key in members if tool.get(key) is not None}
        entries.append(
            WrittenTool(
                {"type": "function", "function": function},
                path,
                ".parameters",
                "function" if kind == "function" else "search",
                called=name,
                namespace=namespace,
                deferred=deferred,
            )
        )
    return entries


def _custom(
    tool: Mapping[str, Any],
    name: str,
    namespace: str,
    path: str,
    place: str,
    inner: str,
    deferred: bool = False,
) -> WrittenTool:
    """Reads a custom tool.

    Args:
        place: of its format, behind ``path``.
        inner: the member of the format that holds its grammar; "" is the format itself.
    """
    member: dict[str, Any] = {"type": "string", "description": "The whole input, as plain text."}
    pattern, schema = "", path + place
    form = tool.get("format")
    if form is not None:
        kinds = ("text", "grammar")
        form = as_object(form, schema)
        if as_choice(required(form, "type", schema), kinds, f"{schema}.type") == "grammar":
            if inner:
                schema += f".{inner}"
                form = as_object(required(form, inner, path + place), schema)
            syntax = as_choice(required(form, "syntax", schema), tuple(_SYNTAX), f"{schema}.syntax")
            text = as_string(required(form, "definition", schema), f"{schema}.definition")
            pattern = _SYNTAX[syntax](text, f"{schema}.definition")
            member["description"] += f" It follows this {syntax} grammar:\n{text}"
            schema += ".definition"
    function = {
        "name": flat_name(name, namespace),
        "description": as_string(tool.get("description") or "", f"{path}.description"),
        "parameters": {"type": "object", "properties": {INPUT: member}, "required": [INPUT]},
        "strict": True,
    }
    written = {"type": "function", "function": function}
    behind = schema.removeprefix(path)
    return WrittenTool(written, path, behind, "custom", pattern, name, namespace, deferred)


_SYNTAX: dict[str, Callable[[str, str], str]] = {
    "lark": pattern_of_lark,
    "regex": pattern_of_regex,
}


def declared_tools(
    tools: object, form: ToolForm = chat_tools, longest_name: int = MAX_NAME
) -> DeclaredTools:
    """Reads and checks a request's ``tools``; those that are known take microseconds.

    An empty list is the same as none.

    Args:
        form: a function of a module. Templates see ``strict`` in the functions of a chat only.
        longest_name: characters in a tool's name.

    Raises:
        InvalidRequest: ``param`` is the path of the invalid value, such as tools[0].function.name.
    """
    if tools is None or tools in ([], ()):
        return NO_TOOLS
    try:
        text = to_json(tools)  # several times as fast as the standard library's
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"'tools' must be JSON: {error}.", "tools", "invalid_type") from error
    return _read(text, form, longest_name)


@lru_cache(KNOWN_TOOLS)
def _read(text: bytes, form: ToolForm, longest_name: int) -> DeclaredTools:
    characters = len(text.decode("utf-8"))
    if characters > MAX_TOOLS_SIZE:
        raise InvalidRequest(
            f"'tools' may have {MAX_TOOLS_SIZE} characters of JSON, got {characters}.",
            "tools",
            "string_above_max_length",
        )
    if text.count(b'"lark"') > MAX_LARK:
        raise InvalidRequest(
            f"'tools' may have {MAX_LARK} Lark grammars.", "tools", "schema_too_complex"
        )
    written = form(as_list(json.loads(text), "tools", MAX_TOOLS))
    served = [tool for tool in written if tool.kind != "unserved"]
    left_out = tuple(tool.called for tool in written if tool.kind == "unserved")
    if not served:
        _check_hosted([tool for tool in written if tool.kind == "unserved"])
        return DeclaredTools(left_out=left_out)
    longest = MAX_CALL_NAME if form is flat_tools else longest_name
    paths = [tool.path for tool in served]
    plain = plain_tools([tool.function for tool in served], longest, paths)
    tools, shown = [], []
    for tool, declared in zip(served, plain, strict=True):
        function = declared["function"]
        strict = function.get("strict") is True
        tools.append(
            Tool(
                function["name"],
                function.get("parameters") or {},
                strict,
                tool.path + tool.schema,
                tool.kind,
                tool.pattern,
                tool.called,
                tool.namespace,
                tool.deferred,
            )
        )
        if form is not chat_tools or tool.kind == "custom":
            declared["function"] = {k: v for k, v in function.items() if k != "strict"}
        if not tool.deferred:
            shown.append(declared)
    return DeclaredTools(tuple(tools), PlainTools(shown) if shown else None, left_out)


def _check_hosted(tools: Sequence[WrittenTool]) -> None:
    """Refuses a request without a tool that is served, if one of its tools has an unknown type."""
    for tool in tools:
        if not tool.called.startswith(HOSTED):
            raise InvalidRequest(
                f"Tools of type {tool.called[:32]!r} are not known, and no other tool is left.",
                f"{tool.path}.type",
                "unsupported_parameter",
            )
