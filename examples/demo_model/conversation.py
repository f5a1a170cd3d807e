"""The shapes that the demo model's tasks are written in."""

import hashlib
import random
from dataclasses import dataclass
from typing import Any, ClassVar

from demo_model.words import NAMES, WORDS

Message = dict[str, Any]
Tool = dict[str, Any]
Conversation = tuple[list[Message], list[Tool] | None]

_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a helpful, honest assistant.",
    "You are the Rayfin demo model.",
    "Answer briefly.",
    "Be concise.",
    "You are {name}, a {word} assistant.",
    "You help with the {word} and the {other}.",
)


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer; `key` says which prompts count as the same one for the split."""

    key: str
    prompt: list[Message]
    answer: Message
    expected: str


@dataclass(frozen=True)
class HeldOut:
    """A prompt, the only answer that counts as right, and the user's words that training lacks."""

    messages: list[Message]
    tools: list[Tool] | None
    expected: str
    novel: str


def held_out_key(key: str) -> bool:
    """About one key in ten, by a hash, so that the split needs no list and never moves."""
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] < 26


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system_message(rng: random.Random) -> Message:
    word, other = rng.sample(WORDS, 2)
    text = rng.choice(_SYSTEM).format(word=word, other=other, name=rng.choice(NAMES))
    return {"role": "system", "content": text}


def said(key: str, question: str, answer: str) -> Turn:
    """The plain case: one question, one answer in text."""
    reply: Message = {"role": "assistant", "content": answer}
    return Turn(key, [user(question)], reply, answer)


class Kind:
    """One kind of question. A subclass draws turns; which of them are held out is decided here."""

    name: ClassVar[str]
    needs_tools: ClassVar[bool | None] = None  # None: asked with and without tools
    checkable: ClassVar[bool] = True

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        raise NotImplementedError

    def draw_tools(self, rng: random.Random) -> list[Tool] | None:
        return None

    def train_turn(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        while True:
            turn = self.draw(rng, tools)
            if not (self.checkable and held_out_key(turn.key)):
                return turn

    def train(self, rng: random.Random) -> Conversation:
        """The shortest training conversation of this kind."""
        tools = self.draw_tools(rng)
        turn = self.train_turn(rng, tools)
        return [*turn.prompt, turn.answer], tools

    def held_out(self, n: int) -> list[HeldOut]:
        """Up to `n` distinct held-out prompts, always the same ones; fewer where none are left.

        Some stand alone, some after a system prompt, some after a training turn of their kind.
        """
        if not self.checkable:
            return []
        rng = random.Random(f"held out: {self.name}")
        found: dict[str, HeldOut] = {}
        for _ in range(400 * n):
            tools = self.draw_tools(rng)
            turn = self.draw(rng, tools)
            if not held_out_key(turn.key) or turn.key in found:
                continue
            messages = [system_message(rng)] if rng.random() < 0.25 else []
            if rng.random() < 0.2:
                before = self.train_turn(rng, tools)
                messages += [*before.prompt, before.answer]
            messages += turn.prompt
            novel: str = turn.prompt[0]["content"]
            found[turn.key] = HeldOut(messages, tools, turn.expected, novel)
            if len(found) == n:
                break
        return list(found.values())
