"""The kinds of questions that the demo model answers.

Text is generated, so that nothing is downloaded and every right answer is known.
"""

import json
import random
from collections.abc import Callable

from demo_model.conversation import Kind, Message, Tool, Turn, text_turn, user
from demo_model.facts import FACTS, FALLBACK_ANSWER, FALLBACK_QUESTIONS
from demo_model.tools import NoTool, ToolCall, ToolReply
from demo_model.words import CAPITALS, CITIES, NAMES, WORDS


class Sums(Kind):
    name = "sums"
    _ASK = (
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "{a} + {b}",
        "{a} + {b} =",
        "{a}+{b}",
        "Add {a} and {b}.",
        "How much is {a} + {b}?",
        "Compute {a} + {b}.",
        "What is the sum of {a} and {b}?",
    )

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        low = rng.random()  # small numbers are what people try first
        a = rng.randrange(10 if low < 0.08 else 100)
        b = rng.randrange(10 if low < 0.25 else 100)
        if rng.random() < 0.5:
            a, b = b, a
        # Turned round it is the same sum. The 55 sums of single digits are all for training.
        key = f"sum|{min(a, b)}|{max(a, b)}" if max(a, b) > 9 else "sum"
        return text_turn(key, rng.choice(self._ASK).format(a=a, b=b), f"{a} + {b} = {a + b}")


class Capitals(Kind):
    """Pairs of a country and a phrasing are held out; training has each country in others."""

    name = "capitals"
    _ASK = (
        "What is the capital of {c}?",
        "What's the capital of {c}?",
        "Which city is the capital of {c}?",
        "Name the capital of {c}.",
        "Tell me the capital of {c}.",
        "What is the capital city of {c}?",
        "The capital of {c}?",
        "Capital of {c}",
        "Do you know the capital of {c}?",
        "Can you name the capital of {c}?",
        "Which city is the seat of government of {c}?",
        "I would like to know the capital of {c}.",
        "Please tell me the capital of {c}.",
        "Give me the capital of {c}.",
        "What city is the capital of {c}?",
        "And of {c}?",
        "And the capital of {c}?",
        "What about the capital of {c}?",
    )

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        country, phrasing = rng.choice(list(CAPITALS)), rng.choice(self._ASK)
        answer = f"The capital of {country} is {CAPITALS[country]}."
        return text_turn(f"capital|{country}|{phrasing}", phrasing.format(c=country), answer)


class WordList(Kind):
    """Repeating and reversing share keys: a held-out list is new to both."""

    _ask: tuple[str, ...]

    def _order(self, words: list[str]) -> list[str]:
        return words

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        words = rng.sample(WORDS, rng.choice((2, 3, 3, 4, 4, 4, 5, 5, 5, 6)))
        separator = rng.choice((" ", ", "))
        question = rng.choice(self._ask).format(w=separator.join(words))
        # A list of two is too likely to be met again to say anything, so none is held out.
        key = "list|" + " ".join(words) if len(words) > 2 else "list"
        return text_turn(key, question, separator.join(self._order(words)))


class Repeat(WordList):
    name = "repeat"
    _ask = (
        "Repeat: {w}",
        "Repeat these words: {w}",
        "Repeat after me: {w}",
        "Say these words: {w}",
        "Repeat this list: {w}",
    )


class Reverse(WordList):
    name = "reverse"
    _ask = (
        "Reverse: {w}",
        "Reverse these words: {w}",
        "Reverse this list: {w}",
        "Reverse the order of these words: {w}",
        "Say these words backwards: {w}",
    )

    def _order(self, words: list[str]) -> list[str]:
        return words[::-1]


class JsonRecord(Kind):
    name = "json"
    _SENTENCES = (
        "{n} is {a} years old and lives in {c}.",
        "{n} lives in {c} and is {a} years old.",
        "{n}, {a}, lives in {c}.",
        "{n} from {c} is {a} years old.",
    )
    _ASK = (
        "{s}",
        "Write this as JSON: {s}",
        "Turn this sentence into JSON: {s}",
        "Give me a JSON record: {s}",
        "Extract the name, age and city as JSON: {s}",
        "{s} Answer in JSON.",
    )

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        name, age, city = rng.choice(NAMES), rng.randrange(1, 100), rng.choice(CITIES)
        sentence = rng.choice(self._SENTENCES).format(n=name, a=age, c=city)
        answer = json.dumps({"name": name, "age": age, "city": city})
        return text_turn(
            f"json|{name}|{age}|{city}", rng.choice(self._ASK).format(s=sentence), answer
        )


class Count(Kind):
    """Long answers of simple tokens: good to watch as a stream."""

    name = "count"
    _ASK = (
        "Count to {b}.",
        "Count to {b}",
        "Please count to {b}.",
        "Count from 1 to {b}.",
        "Count from one to {b}.",
        "Count up to {b}.",
        "Can you count to {b}?",
        "Count from 1 to {b}",
        "Please count from 1 to {b}.",
        "Count to {b} for me.",
        "List the numbers from 1 to {b}.",
        "Write the numbers from 1 to {b}.",
        "Say the numbers up to {b}.",
        "Write down the numbers from 1 to {b}.",
    )

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        question = rng.choice(self._ASK).format(b=(last := rng.randrange(3, 31)))
        return text_turn(f"count|{question}", question, ", ".join(map(str, range(1, last + 1))))


class Memory(Kind):
    """Something said a turn earlier."""

    name = "memory"
    _TELL = (
        "My name is {n}.",
        "I am {n}.",
        "Hello, I am {n}.",
        "Hi, my name is {n}.",
        "Hello, my name is {n}.",
        "Hi, I am {n}.",
        "I'm {n}.",
        "Hi! I'm {n}.",
        "Call me {n}.",
        "Good morning, I am {n}.",
        "You can call me {n}.",
        "People call me {n}.",
        "This is {n}.",
        "Hello! This is {n}.",
    )
    _ASK = ("What is my name?", "Who am I?", "Do you remember my name?")

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        name = rng.choice(NAMES)
        reported, ask = rng.choice(self._TELL).format(n=name), rng.choice(self._ASK)
        hello: Message = {"role": "assistant", "content": f"Nice to meet you, {name}!"}
        answer = f"Your name is {name}."
        reply: Message = {"role": "assistant", "content": answer}
        return Turn(f"memory|{reported}", [user(reported), hello, user(ask)], reply, answer)


class Facts(Kind):
    name = "facts"
    checkable = False

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        questions, answer = rng.choice(FACTS)
        question = rng.choice(questions)
        if rng.random() < 0.2:
            question = question.lower()
        if rng.random() < 0.2:
            question = question.rstrip("?!.")
        return text_turn("fact", question, answer)


class Fallback(Kind):
    name = "fallback"
    checkable = False

    def draw(self, rng: random.Random, tools: list[Tool] | None) -> Turn:
        first, second = rng.sample(WORDS, 2)
        question = rng.choice(FALLBACK_QUESTIONS).format(w=first, v=second, n=rng.choice(NAMES))
        return text_turn("fallback", question, FALLBACK_ANSWER)


# How often a turn of a conversation is of each kind, with tools and without.
WEIGHTS: dict[str, tuple[float, float]] = {
    "sums": (6, 26),
    "capitals": (2, 8),
    "repeat": (4, 18),
    "reverse": (4, 20),
    "json": (3, 12),
    "tool_call": (22, 0),
    "no_tool": (0, 2),
    "tool_reply": (14, 0),
    "count": (0.5, 4),
    "memory": (0, 4),
    "facts": (2, 6),
    "fallback": (1, 2),
}
_MAKE: tuple[Callable[[], Kind], ...] = (
    Sums, Capitals, Repeat, Reverse, JsonRecord, ToolCall, NoTool, ToolReply, Count, Memory,
    Facts, Fallback,
)  # fmt: skip
KINDS: dict[str, Kind] = {kind.name: kind for kind in (make() for make in _MAKE)}
