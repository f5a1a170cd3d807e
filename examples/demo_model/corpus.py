"""Training conversations, assembled from turns of every kind."""

import random
from collections.abc import Iterator

from demo_model.conversation import Conversation, Message, Tool, system_message
from demo_model.tasks import KINDS, WEIGHTS
from demo_model.tools import make_tools

_TOOLS_SHARE, _SYSTEM_SHARE = 0.16, 0.25
_TURNS = (1, 1, 1, 1, 1, 2, 2, 2, 3, 5)


def conversation(rng: random.Random, *, easy: bool = False) -> Conversation:
    """Draws a conversation of one to five turns that fit its tools, or of one turn if `easy`."""
    if easy:
        weights = [pair[1] for pair in WEIGHTS.values()]
        turn = KINDS[rng.choices(list(WEIGHTS), weights)[0]].train_turn(rng, None)
        return [*turn.prompt, turn.answer], None
    tools: list[Tool] | None = make_tools(rng) if rng.random() < _TOOLS_SHARE else None
    messages: list[Message] = [system_message(rng)] if rng.random() < _SYSTEM_SHARE else []
    weights = [pair[0] if tools else pair[1] for pair in WEIGHTS.values()]
    for name in rng.choices(list(WEIGHTS), weights, k=rng.choice(_TURNS)):
        turn = KINDS[name].train_turn(rng, tools)
        messages += [*turn.prompt, turn.answer]
    return messages, tools


def conversations(seed: int, easy: int = 0) -> Iterator[Conversation]:
    """Yields training conversations without end; the first `easy` ones have a single turn.

    The model learns to copy much sooner if little stands between a word and its copy.
    """
    rng = random.Random(seed)
    for _ in range(easy):
        yield conversation(rng, easy=True)
    while True:
        yield conversation(rng)
