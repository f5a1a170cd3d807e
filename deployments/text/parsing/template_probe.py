"""Renders a chat template with small conversations, to see what it writes."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from rayfin.actors.errors import RayfinError
from rayfin.actors.timing import TEMPLATE_SECONDS
from rayfin.deployments.text.chat_template import RENDERING_ERRORS, watched
from rayfin.deployments.text.messages import ContentFormat
from rayfin.deployments.text.parsing.render import WrittenCall, json_text
from rayfin.deployments.text.repair import TemplateRules
from rayfin.deployments.text.tokenizer import Tokenizer

LONGEST = 2**18  # characters of a rendered conversation
SHORTEST_TOKEN = 3  # characters of a token that may be a mark of turns
_OPEN_MARK = re.compile(r"[<\[][^<>\[\]\s]{0,40}$")
_HALF_WORD = re.compile(r"\w+$")

QUESTION = "Which zebra?"
ANSWER = "§ Plain answer."
THOUGHT = "¶ Quiet thought."

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks at zebras.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} for key, kind in properties.items()},
                "required": list(properties),
            },
        },
    }
    for name, properties in (
        ("find_zebra", {"stripe_color": "string", "stripe_count": "integer"}),
        ("count_herd", {"river_name": "string"}),
        ("ring_bell", {}),
        ("paint_fence", {"tone_code": "string", "plank_total": "integer"}),
    )
)
FUNCTIONS: dict[str, dict[str, Any]] = {
    tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS
}
IDS = ("abcdefghi", "jklmnopqr")  # nine letters, which Mistral's templates insist on
FIRST = WrittenCall("find_zebra", {"stripe_color": "violet", "stripe_count": 41}, IDS[0])
SECOND = WrittenCall("count_herd", {"river_name": "Okavango"}, IDS[1])
OTHER = WrittenCall("paint_fence", {"tone_code": "ochre", "plank_total": 73}, IDS[0])
EMPTY = WrittenCall("ring_bell", {}, IDS[0])
Message = dict[str, Any]


def called(calls: Sequence[WrittenCall], as_text: bool, content: str | None) -> Message:
    """An assistant's message with these calls."""
    listed = [
        {
            "type": "function",
            "id": call.id,
            "function": {
                "name": call.name,
                "arguments": json_text(dict(call.arguments)) if as_text else dict(call.arguments),
            },
        }
        for call in calls
    ]
    return {"role": "assistant", "content": content, "tool_calls": listed}


class TemplateProbe:
    """A template, and what it writes around an assistant's plain answer.

    Args:
        chat_template: replaces the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        self._tokens = [t for t in tokenizer.added_ids if len(t) >= SHORTEST_TOKEN]
        self._user = {"role": "user", "content": QUESTION}
        self.begun = self.render([], generation=True)
        self._plain = self.render([{"role": "assistant", "content": ANSWER}])
        self.turn_marks = [token for token in self._tokens if token in (self._plain or "")]

    def content_format(self) -> ContentFormat:
        """What the template takes as content: text, parts, or either."""
        parts = [{"type": "text", "text": QUESTION}]
        written = self.render([{"role": "user", "content": parts}])
        takes_text = (self.begun or "").count(QUESTION) == 1
        if not takes_text:  # what else could it be, if it shows neither
            return "openai" if written is not None and QUESTION in written else "string"
        takes_parts = written is not None and written.count(QUESTION) == 2
        return "given" if takes_parts and "'text'" not in str(written) else "string"

    def render(
        self,
        messages: Sequence[Message],
        *,
        generation: bool = False,
        tools: bool = True,
        variables: Mapping[str, Any] = {},
    ) -> str | None:
        """Returns the text of a question and what follows it, or None if the template refuses."""
        conversation = [self._user, *messages]
        return self.write(conversation, generation=generation, tools=tools, variables=variables)

    def write(
        self,
        messages: Sequence[Message],
        *,
        generation: bool = False,
        tools: bool = True,
        variables: Mapping[str, Any] = {},
    ) -> str | None:
        """Returns the text of a conversation, or None if the template refuses it."""
        conversation = list(map(dict, messages))  # templates may change what they are given

        def write() -> str:
            text = self._tokenizer.inner.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in TOOLS] if tools else None,
                chat_template=self._template,
                add_generation_prompt=generation,
                tokenize=False,
                **variables,
            )
            return str(text)

        try:
            return watched(write, TEMPLATE_SECONDS, LONGEST)
        except (jinja2.TemplateError, RayfinError, *RENDERING_ERRORS):
            return None

    @property
    def shows_tools(self) -> bool:
        """Returns the template has a place for tools, or shows nothing of what is asked."""
        rendered = [self.begun, self.write([_system(ANSWER), self._user], generation=True)]
        parts = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
        asked = [self.render([], tools=False), self.write([parts], tools=False)]
        return _holds(FIRST.name, rendered) or not _holds(QUESTION, asked)

    def opening(self, variables: Mapping[str, Any] = {}) -> str:
        """What the template puts into the model's mouth, "" if it cannot be seen."""
        bare = self.render([], tools=False, variables=variables)
        begun = self.render([], tools=False, generation=True, variables=variables)
        if bare is None or begun is None:
            return ""
        return begun[_same_start(bare, begun) :]

    def segments(self, text: str) -> list[str]:
        """Returns the assistant's turn within ``text`` by several guesses, the shortest first.

        Each begins where an answer, or the turn, begins; what ends the turn is cut off, but of the
        last one.
        """
        starts: list[int] = []
        for other in (self.begun, self.render([]), self._plain):
            if other is not None:
                starts.append(_same_start(text, other))
        end = len(text)
        if self._plain is not None:
            tail = self._plain.partition(ANSWER)[2]
            end -= len(_same_end(text, tail))
        ordered = sorted(set(starts), reverse=True)
        # Turns may end with a part of what ends a call, so the last guess keeps all.
        whole = [text[start:] for start in ordered[:1]]
        return [*(text[start:end] for start in ordered if start < end), *whole]


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def _holds(text: str, rendered: Sequence[str | None]) -> bool:
    return any(one is not None and text in one for one in rendered)


def _same_start(text: str, other: str) -> int:
    """Returns the length of the common beginning; it ends within no word and no mark."""
    length = 0
    for mine, yours in zip(text, other, strict=False):
        if mine != yours:
            break
        length += 1
    if length == len(other):
        return length
    for inside in (_OPEN_MARK, _HALF_WORD):
        match = inside.search(text, max(0, length - 48), length)
        following = text[length : length + 1] + other[length : length + 1]
        if match is not None and (inside is _OPEN_MARK or re.search(r"\w", following)):
            length = match.start()
    return length


def _same_end(text: str, tail: str) -> str:
    """Returns the longest end of ``tail`` that is an end of ``text`` too, from a mark on."""
    if text.endswith(tail):
        return tail
    starts = [match.start() for match in re.finditer(r"(?<!\S)\S|[<\[]", tail)]
    return next((tail[at:] for at in starts if text.endswith(tail[at:])), "")


SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
USER: dict[str, Any] = {"role": "user", "content": QUESTION}
SAID: dict[str, Any] = {"role": "assistant", "content": ANSWER}


def find_rules(probe: TemplateProbe, arguments_as_text: bool) -> TemplateRules:
    """Returns the rules of a template that renders a plain conversation; else those of none."""

    def refuses(*messages: dict[str, Any]) -> bool:
        return probe.write(messages) is None

    def asks(*calls: Any) -> dict[str, Any]:
        return called(calls, arguments_as_text, "")

    def gave(call: Any) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "x"}

    if refuses(USER, SAID, USER):
        return TemplateRules()
    no_system = refuses(SYSTEM, USER)
    round_of_one = (USER, asks(FIRST), gave(FIRST))
    systems = ((SYSTEM, SYSTEM, USER), (USER, SAID, SYSTEM, USER), (USER, SYSTEM, USER))
    no_results = refuses(*round_of_one)
    round_of_two = (USER, asks(FIRST, SECOND), gave(FIRST), gave(SECOND))
    return TemplateRules(
        system_first=not no_system and any(refuses(*messages) for messages in systems),
        no_system=no_system,
        no_results=no_results,
        no_user_after_results=not no_results and refuses(*round_of_one, USER),
        alternates=refuses(USER, USER) or refuses(USER, SAID, USER, USER),
        one_call=not no_results and refuses(*round_of_two),
    )
