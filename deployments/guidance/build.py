"""From a grammar, tool calls and a thought to the rules that travel with a request."""

from rayfin.actors.guidance import Guidance, Thinking
from rayfin.deployments.guidance.grammar import Grammar


def build_guidance(
    *, grammar: Grammar | None = None, thinking: Thinking | None = None
) -> Guidance | None:
    """Returns the rules of all choices of a request, or None if their tokens are free.

    ``build_requests`` adds the ends, which depend on the prompt. A thought without a budget
    matters only where a grammar follows it.
    """
    if grammar is None and (thinking is None or thinking.budget is None):
        return None
    return Guidance(grammar="" if grammar is None else grammar.text, thinking=thinking)
