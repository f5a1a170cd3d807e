"""Request bodies of Ollama's API, in the terms of the other APIs."""

from collections import deque
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.generation.bodies import GenerationBody
from rayfin.deployments.generation.members import unserved
from rayfin.deployments.generation.plan import AnswerRules
from rayfin.deployments.generation.prompts import thinking_variables
from rayfin.deployments.guidance.tool_choice import ToolChoice
from rayfin.deployments.guidance.tools import DeclaredTools, declared_tools
from rayfin.deployments.http.json_body import rename_error_params, validate
from rayfin.deployments.text.checks import as_list, as_object, as_string, is_empty, wrong_type
from rayfin.deployments.text.messages import MAX_MESSAGES, MAX_TOOLS

OPTIONS = {  # of the model's runner -> ours
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
RANGES = {"temperature": (0, 2), "top_p": (0, 1), "min_p": (0, 1)}  # others are cut to these
LIMIT = "num_predict"
PATHS = {ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()}
REFUSED = ("template", "suffix")  # unless empty


class OllamaBody(BaseModel):
    """What both kinds of generation have; None is the same as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    stream: bool | None = None  # None: yes
    format: Any = None  # "json", or a JSON schema
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None  # a model stays loaded

    @property
    def loads_only(self) -> bool:
        """Returns whether the client only wants the model to be loaded."""
        raise NotImplementedError

    @cached_property
    def declared_tools(self) -> DeclaredTools:
        return declared_tools(None)

    def chat(self) -> list[dict[str, Any]]:
        """Returns the conversation as chat messages, which are not checked yet.

        Raises:
            InvalidRequest: ``param`` is the path of what is wrong.
        """
        raise NotImplementedError

    def ignored_fields(self) -> list[str]:
        unread = [name for name in self.options or {} if name not in (*OPTIONS, LIMIT)]
        extra = [name for name in self.model_extra or {} if name not in REFUSED]
        return extra + [f"options.{name}" for name in unread]

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Returns the checked sampling settings; ``defaults`` fill the options that are left out.

        Raises:
            InvalidRequest: a value out of range, or a member that is not served.
        """
        for name in REFUSED:
            if not is_empty((self.model_extra or {}).get(name)):
                raise unserved(name)
        given = {name: value for name, value in (self.options or {}).items() if value is not None}
        limit = given.get(LIMIT, -1)
        if not isinstance(limit, int) or isinstance(limit, bool):
            raise wrong_type("a whole number", limit, f"options.{LIMIT}")
        shared = {OPTIONS[name]: value for name, value in given.items() if name in OPTIONS}
        for name, (low, high) in RANGES.items():
            if isinstance(shared.get(name), int | float):
                shared[name] = min(max(shared[name], low), high)
        if shared.get("seed") == -1:  # Ollama's word for any
            del shared["seed"]
        with rename_error_params({**PATHS, "max_tokens": f"options.{LIMIT}"}):
            body = validate(shared, GenerationBody)
            return body.sampling_params(dict(defaults), limit if limit > 0 else None)

    def rules(self) -> AnswerRules:
        """Returns what the request says of the form of its answer."""
        tools = self.declared_tools.functions
        form = self.format
        if form in (None, ""):
            return AnswerRules(tools=tools, choice=ToolChoice())
        if form != "json":
            as_object(form, "format")
        outputs = StructuredOutputs(json_object=True) if form == "json" else None
        structured = outputs or StructuredOutputs(json=form)
        return AnswerRules(tools=tools, structured=structured, structured_param="format")

    def template_variables(self) -> dict[str, Any]:
        if isinstance(self.think, bool):
            return dict.fromkeys(("enable_thinking", "thinking"), self.think)
        return thinking_variables(None, self.think or None)


class OllamaChat(OllamaBody):
    messages: Any = None
    tools: list[Any] | None = None

    @property
    def loads_only(self) -> bool:
        return is_empty(self.messages)

    @cached_property
    def declared_tools(self) -> DeclaredTools:
        return declared_tools(self.tools)

    def chat(self) -> list[dict[str, Any]]:
        """Gives each result the first call that has none, or the first of its ``tool_name``."""
        # Ids and names of calls; each result looks through them.
        waiting: deque[tuple[str, object]] = deque(maxlen=MAX_TOOLS)
        chat = []
        for i, written in enumerate(as_list(self.messages, "messages", MAX_MESSAGES)):
            message = as_object(written, f"messages[{i}]")
            said: dict[str, Any] = {
                "role": message.get("role"),
                "content": _content(message, f"messages[{i}]"),
            }
            if message.get("thinking") is not None:
                said["reasoning_content"] = message["thinking"]
            if not is_empty(message.get("tool_calls")):
                path = f"messages[{i}].tool_calls"
                calls: list[dict[str, Any]] = []
                said["tool_calls"] = calls
                for call in as_list(message["tool_calls"], path, MAX_TOOLS):
                    function = as_object(call, path).get("function")
                    name = function.get("name") if isinstance(function, Mapping) else None
                    waiting.append((f"call_{i}_{len(calls)}", name))
                    calls.append({"type": "function", "id": waiting[-1][0], "function": function})
            if said["role"] == "tool":
                name = message.get("tool_name")
                meant = next((call for call in waiting if name in (None, call[1])), None)
                if meant is not None:
                    waiting.remove(meant)
                said["tool_call_id"] = "call_0" if meant is None else meant[0]
            chat.append(said)
        return chat


class OllamaGenerate(OllamaBody):
    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None  # the prompt is rendered by no template

    @property
    def loads_only(self) -> bool:
        return not self.prompt

    def raw_prompt(self) -> str:
        """Returns the prompt that no template renders.

        Raises:
            InvalidRequest: what only a template has a place for.
        """
        for name in ("system", "images"):
            if getattr(self, name):
                raise unserved(name, which="beside raw ")
        return self.prompt or ""

    def chat(self) -> list[dict[str, Any]]:
        message = {"role": "user", "content": self.prompt, "images": self.images}
        chat = [{"role": "user", "content": _content(message, "prompt")}]
        return [{"role": "system", "content": self.system}, *chat] if self.system else chat


class OllamaEmbed(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    input: Any = None
    truncate: bool | None = None  # None: yes
    dimensions: int | None = None


class OllamaName(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    name: str | None = None  # its older name


def _content(message: Mapping[str, Any], path: str) -> Any:
    """Returns a text, or parts of it and its pictures."""
    text = message.get("content") or ""
    if is_empty(message.get("images")):
        return text
    pictures = as_list(message["images"], f"{path}.images", MAX_MESSAGES)
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    for i, picture in enumerate(pictures):
        if not isinstance(picture, str):
            raise InvalidRequest(f"'{path}.images[{i}]' must be base64.", f"{path}.images[{i}]")
        data = as_string(picture, f"{path}.images[{i}]")
        url = f"data:image/png;base64,{data}"  # its bytes say what it is
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return parts
