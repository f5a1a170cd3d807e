"""Questions for a tool: the tools themselves, the call, and the answer made from a result."""

import json
import random
from dataclasses import dataclass
from typing import Any

from demo_model.conversation import Kind, Message, Tool, Turn, text_turn, user
from demo_model.words import CITIES


@dataclass(frozen=True)
class Topic:
    """What one tool knows, and the ways to ask for it."""

    subject: str
    functions: tuple[str, ...]
    about: tuple[str, ...]
    questions: tuple[str, ...]


WEATHER = Topic(
    "weather",
    ("get_weather", "get_current_weather"),
    ("Get the current weather for a city.", "Get the weather in a city", "Current weather"),
    (
        "What is the weather in {c}?",
        "What's the weather like in {c}?",
        "How is the weather in {c} today?",
        "Tell me the weather in {c}.",
        "What is the weather like in {c} today?",
        "Is it raining in {c}?",
        "Is it cold in {c} now?",
        "Weather in {c}?",
        "How warm is it in {c}?",
        "Do I need an umbrella in {c}?",
    ),
)
TIME = Topic(
    "time",
    ("get_time", "get_current_time"),
    ("Get the local time in a city.", "Current time"),
    ("What time is it in {c}?", "Tell me the time in {c}.", "What is the time in {c} now?"),
)
_ARGUMENTS = ("city", "city", "city", "location")
_CONDITIONS = ("sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "clear", "stormy")


def make_tool(rng: random.Random, topic: Topic) -> Tool:
    """A tool as clients declare it, with varying names and optional parts."""
    argument = rng.choice(_ARGUMENTS)
    field: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.4:
        field["description"] = rng.choice(("The city", "City name", "The name of the city"))
    fields: dict[str, Any] = {argument: field}
    if rng.random() < 0.15:
        fields["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    parameters: dict[str, Any] = {"type": "object", "properties": fields}
    if rng.random() < 0.8:
        parameters["required"] = [argument]
    function: dict[str, Any] = {"name": topic.functions[rng.random() < 0.2]}
    if rng.random() < 0.8:
        function["description"] = rng.choice(topic.about)
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def make_tools(rng: random.Random) -> list[Tool]:
    """The weather tool, sometimes with the time tool."""
    topics = rng.choice(((WEATHER,),) * 8 + ((WEATHER, TIME), (TIME, WEATHER)))
    return [make_tool(rng, topic) for topic in topics]


def find_tool(tools: list[Tool], topic: Topic) -> tuple[str, str] | None:
    """Returns the name and the argument of the tool for a topic, or None."""
    for tool in tools:
        function = tool["function"]
        if function["name"] in topic.functions:
            return function["name"], next(iter(function["parameters"]["properties"]))
    return None


def _ask(rng: random.Random, topic: Topic) -> tuple[str, str, str]:
    """Draws a city and a question, with the key that calls and refusals share."""
    city = rng.choice(CITIES)
    question = rng.choice(topic.questions).format(c=city)
    return city, question, f"{topic.subject}|{question}"


def _call(name: str, argument: str, city: str) -> tuple[Message, str]:
    arguments = {argument: city}
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return message, f"<tool_call>\n{body}\n</tool_call>"


def _declined(topic: Topic) -> str:
    return f"I cannot look up the {topic.subject}, because I have no tool for it."


def _topic(rng: random.Random) -> Topic:
    return TIME if rng.random() < 0.2 else WEATHER


class ToolCall(Kind):
    """Questions with tools: a call in the Hermes format, or a refusal if no tool fits."""

    name = "tool_call"
    needs_tools = True

    def draw_tools(self, rng: random.Random) -> list[Tool] | None:
        return make_tools(rng)

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        topic = _topic(rng)
        city, question, key = _ask(rng, topic)
        tool = find_tool(tools or [], topic)
        if tool is None:
            return text_turn(key, question, _declined(topic))
        message, expected = _call(*tool, city)
        return Turn(key, [user(question)], message, expected)


class NoTool(Kind):
    """The same questions without tools: a refusal."""

    name = "no_tool"
    needs_tools = False

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        topic = _topic(rng)
        _, question, key = _ask(rng, topic)
        return text_turn(key, question, _declined(topic))


class ToolReply(Kind):
    """A tool's result, to be stated in a sentence."""

    name = "tool_reply"
    needs_tools = True

    def draw_tools(self, rng: random.Random) -> list[Tool] | None:
        return make_tools(rng)

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        offered = tools or []
        topic = _topic(rng)
        tool = find_tool(offered, topic)
        if tool is None:
            topic = WEATHER if topic is TIME else TIME
            tool = find_tool(offered, topic)
        if tool is None:
            raise ValueError("a tool reply needs the weather tool or the time tool")
        city, question, key = _ask(rng, topic)
        call, _ = _call(*tool, city)
        fields: dict[str, Any]
        if topic is TIME:
            clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
            fields, answer = {"time": clock}, f"It is {clock} in {city}."
        else:
            degrees, sky = rng.randrange(-10, 41), rng.choice(_CONDITIONS)
            fields = {"temperature": degrees, rng.choice(("condition", "weather", "sky")): sky}
            answer = f"It is {sky} in {city}, {degrees} degrees."
        items = list(fields.items())
        rng.shuffle(items)
        if rng.random() < 0.5:
            items.insert(0, (tool[1], city))
        content = json.dumps(dict(items))
        prompt = [user(question), call, {"role": "tool", "content": content}]
        reply: Message = {"role": "assistant", "content": answer}
        return Turn(key, prompt, reply, answer)
