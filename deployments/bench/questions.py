"""Questions of simulated users."""

import random
from collections.abc import Callable

Messages = list[dict[str, str]]
Ask = Callable[[random.Random], Messages]

CAPITALS = ("France", "Italy", "Spain", "Peru", "Japan", "Kenya", "Norway", "Egypt")
WORDS = ("apple", "river", "stone", "cloud", "lamp", "horse", "paper", "green")
SYLLABLES = ("ba", "do", "fi", "ga", "ka", "lo", "mi", "ne", "po", "ra", "su", "ti")


def questions() -> Ask:
    """Short questions of the kinds that the demo model was trained for."""

    def ask(rng: random.Random) -> Messages:
        words = ", ".join(rng.sample(WORDS, rng.randint(2, 4)))
        kinds = (
            f"What is {rng.randint(1, 49)} + {rng.randint(1, 49)}?",
            f"What is the capital of {rng.choice(CAPITALS)}?",
            f"Repeat: {words}",
            f"Reverse this list: {words}",
            "What is Rayfin?",
        )
        return _as_messages(rng.choice(kinds))

    return ask


def random_words(tokens: int) -> Ask:
    """Prompts of about ``tokens`` tokens that no two requests share."""

    def ask(rng: random.Random) -> Messages:
        words = ("".join(rng.choices(SYLLABLES, k=2)) for _ in range(max(1, tokens // 2)))
        return _as_messages(" ".join(words))

    return ask


def _as_messages(text: str) -> Messages:
    return [{"role": "user", "content": text}]
