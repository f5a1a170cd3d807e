"""The tool calls and the reasoning of one answer, as its events arrive."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rayfin.deployments.generation.plan import NO_PLAN, OutputPlan
from rayfin.deployments.telemetry.ingress_counters import IngressCounters
from rayfin.deployments.text.call_ids import make_call_id
from rayfin.deployments.text.parsing.events import Event


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

    def as_openai(self) -> dict[str, Any]:
        """Returns the call as it stands in a chat message."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class ParsedAnswer:
    """What the events of one answer add up to, besides its content."""

    def __init__(self, plan: OutputPlan = NO_PLAN, request_id: str = "") -> None:
        self.plan = plan
        self._request_id = request_id
        self._reasoning: list[str] = []
        self.calls: list[AnswerCall] = []  # by index; the last one may be unfinished
        self.reasoning_tokens = 0

    def add(self, events: Sequence[Event], reasoning_tokens: int) -> None:
        """Adds what a delta has brought."""
        self.reasoning_tokens += reasoning_tokens
        for event in events:
            if event.kind == "reasoning":
                self._reasoning.append(event.text)
            elif event.kind == "call":
                self.calls.append(AnswerCall(self._id(event), event.name))
            elif event.kind == "arguments":
                self.calls[event.index].pieces.append(event.text)
            elif event.kind == "call_end":
                self.calls[event.index].finished = True

    def _id(self, event: Event) -> str:
        """The same whenever the same request is answered or resumed."""
        seed = f"{self._request_id}:{event.index}"  # the engine's id has the choice's number
        number = self.plan.earlier_calls + event.index
        return make_call_id(self.plan.id_style, seed, event.name, number)

    @property
    def whole_calls(self) -> list[AnswerCall]:
        """The finished calls. One that was cut is left out: half a JSON text helps no one."""
        return [call for call in self.calls if call.finished]

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def count(self, counts: IngressCounters, unparsed: int) -> None:
        """Counts the whole answer; ``unparsed`` calls of it became content."""
        choice, guidance = self.plan.choice, self.plan.guidance
        whole = len(self.whole_calls)
        if whole:
            named = "named" if choice.name is not None else "required"
            counts.tool_calls[named if choice.forced else "auto"] += whole
        counts.tool_calls_unparsed += unparsed
        counts.tool_calls_cut += len(self.calls) - whole
        counts.reasoning_tokens += self.reasoning_tokens
        budget = guidance.thinking.budget if guidance and guidance.thinking else None
        if budget is not None and self.reasoning_tokens >= budget:
            counts.thinking_budgets_spent += 1

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns OpenAI's reason: ``tool_calls`` if the answer stopped and holds calls.

        An answer that had to call one named function stops, and a cut one keeps its reason.
        """
        named = self.plan.choice.name is not None
        return "tool_calls" if reason == "stop" and self.whole_calls and not named else reason

    def content(self, text: str) -> str | None:
        """Returns a message's content for its ``text``; None if there are other parts only."""
        if text or self.plan.choice.forced:
            return text
        return None if self.whole_calls or self._reasoning else ""
