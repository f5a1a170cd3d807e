"""The data structures of the demo model's tasks."""

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
    """A prompt and its answer. Prompts with the same `key` are on the same side of the split."""

    key: str
    prompt: list[Message]
    answer: Message
    expected: str


@dataclass(frozen=True)
class HeldOut:
    """A prompt, its only right answer, and the user's words that training lacks."""

    messages: list[Message]
    tools: list[Tool] | None
    expected: str
    novel: str


def held_out_key(key: str) -> bool:
    """Whether a key is held out: about one in ten, by a hash, so that the split never changes."""
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] < 26


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system_message(rng: random.Random) -> Message:
    word, other = rng.sample(WORDS, 2)
    text = rng.choice(_SYSTEM).format(word=word, other=other, name=rng.choice(NAMES))
    return {"role": "system", "content": text}


def text_turn(key: str, question: str, answer: str) -> Turn:
    """A turn of one question and one answer in text."""
    reply: Message = {"role": "assistant", "content": answer}
    return Turn(key, [user(question)], reply, answer)


class Kind:
    """One kind of question. Subclasses draw turns; this class holds some of them out."""

    name: ClassVar[str]
    needs_tools: ClassVar[bool | None] = None  # None: with and without tools
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
        """A training conversation of one turn."""
        tools = self.draw_tools(rng)
        turn = self.train_turn(rng, tools)
        return [*turn.prompt, turn.answer], tools

    def held_out(self, n: int) -> list[HeldOut]:
        """Returns up to `n` distinct held-out prompts, always the same ones.

        Some stand alone, some follow a system prompt or a training turn of their kind.
        """
        if not self.checkable:
            return []
        rng = random.Random(f"held out: {self.name}")
        prompts: dict[str, HeldOut] = {}
        for _ in range(400 * n):
            tools = self.draw_tools(rng)
            turn = self.draw(rng, tools)
            if not held_out_key(turn.key) or turn.key in prompts:
                continue
            messages = [system_message(rng)] if rng.random() < 0.25 else []
            if rng.random() < 0.2:
                before = self.train_turn(rng, tools)
                messages += [*before.prompt, before.answer]
            messages += turn.prompt
            novel: str = turn.prompt[0]["content"]
            prompts[turn.key] = HeldOut(messages, tools, turn.expected, novel)
            if len(prompts) == n:
                break
        return list(prompts.values())
