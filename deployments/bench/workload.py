"""What a benchmark asks: prompts of token ids with times of arrival."""

import csv
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rayfin.actors.errors import InvalidConfig

Ramp = Literal["linear", "exponential"]

LOWEST_TOKEN = 10  # ids below are often special


@dataclass(frozen=True, slots=True)
class Job:
    """One request. It ignores the end of the text and runs to its full length."""

    prompt: tuple[int, ...]
    output_tokens: int
    arrival: float = 0.0  # seconds after the start


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform distribution of the integers from ``low`` to ``high``."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, param: str) -> "Lengths":
        """Parses "128" or "50-400".

        Raises:
            InvalidConfig: the text is malformed.
        """
        low, _, high = text.partition("-")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise InvalidConfig(
                f"{param} must be like 128 or 50-400, got {text!r}", param
            ) from None
        if not 0 < lengths.low <= lengths.high:
            raise InvalidConfig(f"{param} must be positive and rising, got {text!r}", param)
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


def random_jobs(
    count: int, prompt: Lengths, output: Lengths, *, vocabulary: int, seed: int = 0
) -> list[Job]:
    """Jobs with random prompts."""
    rng = random.Random(seed)
    return [Job(_tokens(rng, prompt.draw(rng), vocabulary), output.draw(rng)) for _ in range(count)]


def shared_prefix_jobs(
    count: int,
    prefix_tokens: int,
    prompt: Lengths,
    output: Lengths,
    *,
    prefixes: int = 1,
    vocabulary: int,
    seed: int = 0,
) -> list[Job]:
    """Jobs whose prompts begin with one of ``prefixes`` long prefixes, in turn."""
    rng = random.Random(seed)
    shared = [_tokens(rng, prefix_tokens, vocabulary) for _ in range(prefixes)]
    return [
        Job(shared[i % prefixes] + _tokens(rng, prompt.draw(rng), vocabulary), output.draw(rng))
        for i in range(count)
    ]


def jobs_of_lengths(path: Path, *, vocabulary: int, seed: int = 0) -> list[Job]:
    """Reads a job from each line "prompt tokens,output tokens" of a CSV file.

    Raises:
        InvalidConfig: a line is malformed; the message names it.
    """
    rng = random.Random(seed)
    jobs = []
    with path.open(newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            if not row or not row[0].strip().lstrip("-").isdigit():
                if number == 1 or not row:  # a heading, an empty line
                    continue
            try:
                prompt, output = int(row[0]), int(row[1])
                if prompt < 1 or output < 1:
                    raise ValueError
            except (ValueError, IndexError):
                raise InvalidConfig(
                    f"{path}, line {number}: two positive numbers expected, got {','.join(row)!r}",
                    "lengths",
                ) from None
            jobs.append(Job(_tokens(rng, prompt, vocabulary), output))
    return jobs


def jobs_of_trace(path: Path, *, vocabulary: int, seed: int = 0) -> list[Job]:
    """Reads a job from each line {"arrival": s, "prompt_tokens": n | [ids], "output_tokens": n}.

    Raises:
        InvalidConfig: a line is malformed; the message names it.
    """
    rng = random.Random(seed)
    jobs = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry: dict[str, Any] = json.loads(line)
            prompt = entry["prompt_tokens"]
            ids = _tokens(rng, prompt, vocabulary) if isinstance(prompt, int) else tuple(prompt)
            job = Job(ids, int(entry["output_tokens"]), float(entry.get("arrival", 0)))
            if not job.prompt or job.output_tokens < 1 or job.arrival < 0:
                raise ValueError
        except (ValueError, TypeError, LookupError):
            raise InvalidConfig(f"{path}, line {number}: invalid job: {line[:80]!r}") from None
        jobs.append(job)
    return sorted(jobs, key=lambda job: job.arrival)


def arrivals(
    count: int,
    rate: float,
    *,
    burstiness: float = 1.0,
    ramp_to: float | None = None,
    ramp: Ramp = "linear",
    seed: int = 0,
) -> list[float]:
    """Times of arrival [count], seconds, the first at 0.

    Gaps are gamma distributed with the shape ``burstiness`` (vLLM's meaning: 1 is a Poisson
    process, less is burstier, infinity is a fixed rate). ``ramp_to`` moves the rate from ``rate``
    to its value, by equal steps, or by equal factors where ``ramp`` is exponential. An infinite
    rate sends everything at once.
    """
    rng = random.Random(seed)
    times: list[float] = []
    now = 0.0
    for index in range(count):
        times.append(now)
        way = index / max(1, count - 1)
        if ramp_to is None:
            current = rate
        elif ramp == "linear":
            current = rate + (ramp_to - rate) * way
        else:
            current = rate * (ramp_to / rate) ** way
        mean = 1 / current  # 0.0 for an infinite rate
        if mean and burstiness != float("inf"):
            mean = rng.gammavariate(burstiness, mean / burstiness)
        now += mean
    return times


def arriving(jobs: Sequence[Job], times: Sequence[float]) -> list[Job]:
    """The jobs, with ``times`` as their times of arrival."""
    return [Job(job.prompt, job.output_tokens, time) for job, time in zip(jobs, times, strict=True)]


def varied(jobs: Sequence[Job], number: int) -> list[Job]:
    """The same jobs with other tokens; prefixes that two prompts share stay shared."""
    low = min(token for job in jobs for token in job.prompt)
    span = max(token for job in jobs for token in job.prompt) - low + 1
    return [
        Job(
            tuple(low + (token - low + number) % span for token in job.prompt),
            job.output_tokens,
            job.arrival,
        )
        for job in jobs
    ]


def _tokens(rng: random.Random, count: int, vocabulary: int) -> tuple[int, ...]:
    low = min(LOWEST_TOKEN, vocabulary - 1)
    return tuple(rng.randrange(low, vocabulary) for _ in range(count))
