"""Whether an answer starts inside a thought."""

from rayfin.deployments.text.parsing.format import ReasoningFormat


def thought_start(reasoning: ReasoningFormat | None, opening: str) -> bool:
    """Whether the prompt has opened a thought.

    Args:
        opening: what the template puts into the model's mouth, never the history before it.
    """
    return reasoning is not None and opened(reasoning, opening) and not closed(reasoning, opening)


def opened(reasoning: ReasoningFormat, opening: str) -> bool:
    """Whether a thought begins in ``opening``."""
    return any(mark in opening for mark in reasoning.open)


def closed(reasoning: ReasoningFormat, opening: str) -> bool:
    """Whether the last thought in ``opening`` has ended there."""
    begun = max((opening.rfind(mark) for mark in reasoning.open), default=-1)
    return any(opening.rfind(mark) > begun for mark in reasoning.close)
