"""What simulated users ask."""

import random
from collections.abc import Callable

Messages = list[dict[str, str]]
Ask = Callable[[random.Random], Messages]

KINDS = ("sums", "capitals", "repeat", "reverse", "json", "count", "memory", "facts")
PLAIN_QUESTIONS = (
    "What is 37 + 48?",
    "What is the capital of Italy?",
    "Tell me a short story about a river and a stone.",
    "Explain in one sentence what a cache is.",
    "Name three animals that live in the sea.",
)
SYLLABLES = ("ba", "do", "fi", "ga", "ka", "lo", "mi", "ne", "po", "ra", "su", "ti")


def questions() -> Ask:
    """Questions that the demo model was made for; plain ones where it was left out."""
    try:
        from rayfin.deployments.demo.tasks import KINDS as TASKS
    except ImportError:
        return lambda rng: _said(rng.choice(PLAIN_QUESTIONS))
    tasks = [TASKS[name] for name in KINDS if name in TASKS]
    return lambda rng: rng.choice(tasks).draw(rng, None).prompt


def random_words(tokens: int) -> Ask:
    """Prompts of about ``tokens`` tokens that no two requests share."""

    def ask(rng: random.Random) -> Messages:
        words = ("".join(rng.choices(SYLLABLES, k=2)) for _ in range(max(1, tokens // 2)))
        return _said(" ".join(words))

    return ask


def _said(text: str) -> Messages:
    return [{"role": "user", "content": text}]
