"""The tool calls and the reasoning of one answer as its events arrive, and the calls' ids."""

import hashlib
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from rayfin.deployments.generation.plan import NO_PLAN, OutputPlan
from rayfin.deployments.text.parsing.events import Event

ALPHANUMERIC = string.ascii_letters + string.digits
MISTRAL_LENGTH = 9


def call_id(plan: OutputPlan, request_id: str, index: int, name: str) -> str:
    """Returns the id of a call: the same whenever the same request is answered or resumed.

    Args:
        request_id: of the choice's engine request; it has the choice's number.
        index: of the call, from 0.
        name: of its function.
    """
    if plan.id_style == "kimi":
        return f"functions.{name}:{plan.earlier_calls + index}"
    digest = hashlib.sha256(f"{request_id}:{index}".encode()).digest()
    if plan.id_style == "mistral":
        letters = (ALPHANUMERIC[byte % len(ALPHANUMERIC)] for byte in digest)
        return "".join(letters)[:MISTRAL_LENGTH]
    return f"call_{digest.hex()[:24]}"


@dataclass(slots=True)
class AnswerCall:
    """One tool call."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)  # of the arguments' JSON text
    finished: bool = False

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


class ParsedAnswer:
    """What the events of one answer add up to, besides its content."""

    def __init__(self, plan: OutputPlan = NO_PLAN, request_id: str = "") -> None:
        self.plan = plan
        self._request_id = request_id
        self._reasoning: list[str] = []
        self.started: list[AnswerCall] = []  # by index; the last one may be unfinished
        self.reasoning_tokens = 0

    def add(self, events: Sequence[Event], reasoning_tokens: int) -> None:
        """Adds what a delta has brought."""
        self.reasoning_tokens += reasoning_tokens
        for event in events:
            if event.kind == "reasoning":
                self._reasoning.append(event.text)
            elif event.kind == "call":
                name = event.name
                made = call_id(self.plan, self._request_id, event.index, name)
                self.started.append(AnswerCall(made, name))
            elif event.kind == "arguments":
                self.started[event.index].pieces.append(event.text)
            elif event.kind == "call_end":
                self.started[event.index].finished = True

    @property
    def calls(self) -> list[AnswerCall]:
        """The whole calls. One that was cut is left out: half a JSON text helps no one."""
        return [call for call in self.started if call.finished]

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns OpenAI's reason: ``tool_calls`` if the answer stopped and holds calls.

        An answer that had to call one named function stops, and a cut one keeps its reason.
        """
        named = self.plan.choice.name is not None
        return "tool_calls" if reason == "stop" and self.calls and not named else reason

    def content(self, text: str) -> str | None:
        """Returns a message's content for its ``text``; None if there are other parts only."""
        if text or self.plan.choice.forced:
            return text
        return None if self.calls or self._reasoning else ""
