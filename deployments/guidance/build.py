"""From a grammar, tool calls and a thought to the rules that travel with a request."""

from rayfin.actors.guidance import Guidance, Thinking
from rayfin.deployments.guidance.calls import CallRules

FREE = CallRules()


def build_guidance(
    *, grammar: str = "", calls: CallRules = FREE, thinking: Thinking | None = None
) -> Guidance | None:
    """Returns the rules of all choices of a request, or None if their tokens are free.

    ``build_requests`` adds the ends, which depend on the prompt. A thought without a budget
    matters only where a grammar follows it.

    Args:
        grammar: of the whole answer after its thought, forced calls included.
        calls: of calls in an answer that is free otherwise.
    """
    thinks = thinking is not None and thinking.budget is not None
    if not (grammar or calls.calls or calls.forbidden or thinks):
        return None
    return Guidance(grammar, calls.calls, calls.forbidden, thinking)
