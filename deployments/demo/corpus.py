"""Training conversations: turns of every kind, put together the way a chat puts them together."""

import random
from collections.abc import Iterator

from rayfin.deployments.demo.conversation import Conversation, Message, Tool, system_message
from rayfin.deployments.demo.tasks import KINDS, WEIGHTS
from rayfin.deployments.demo.tools import make_tools

_TOOLS_SHARE, _SYSTEM_SHARE = 0.2, 0.3
_TURNS = (1, 1, 1, 1, 2, 2, 2, 3, 3, 5)


def conversation(rng: random.Random) -> Conversation:
    """One conversation of one to five turns, of kinds that fit its tools."""
    tools: list[Tool] | None = make_tools(rng) if rng.random() < _TOOLS_SHARE else None
    messages: list[Message] = [system_message(rng)] if rng.random() < _SYSTEM_SHARE else []
    weights = [pair[0] if tools else pair[1] for pair in WEIGHTS.values()]
    for name in rng.choices(list(WEIGHTS), weights, k=rng.choice(_TURNS)):
        turn = KINDS[name].train_turn(rng, tools)
        messages += [*turn.prompt, turn.answer]
    return messages, tools


def conversations(seed: int) -> Iterator[Conversation]:
    """The training text of a seed, without end."""
    rng = random.Random(seed)
    while True:
        yield conversation(rng)
