"""What a benchmark asks for: prompts of token ids, output lengths, and times of arrival."""

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig

LOWEST_TOKEN = 10  # ids below are often special


@dataclass(frozen=True, slots=True)
class Job:
    """One request. It always runs to its full length: the end of the text is ignored."""

    prompt: tuple[int, ...]
    output_tokens: int
    arrival: float = 0.0  # seconds after the start


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from ``low`` to ``high``, each as likely."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, param: str) -> "Lengths":
        """Reads "128" or "50-400".

        Raises:
            InvalidConfig: anything else.
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
    """Prompts of random tokens that share nothing."""
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
    """Prompts that begin with one of a few long prefixes, in turn."""
    rng = random.Random(seed)
    shared = [_tokens(rng, prefix_tokens, vocabulary) for _ in range(prefixes)]
    return [
        Job(shared[i % prefixes] + _tokens(rng, prompt.draw(rng), vocabulary), output.draw(rng))
        for i in range(count)
    ]


def jobs_of_lengths(path: Path, *, vocabulary: int, seed: int = 0) -> list[Job]:
    """A job for each line "prompt tokens,output tokens" of a CSV file.

    Raises:
        InvalidConfig: a line that holds something else; the message names it.
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
    """A job for each JSON line {"arrival": s, "prompt_tokens": n | [ids], "output_tokens": n}.

    Raises:
        InvalidConfig: a line that is no such object; the message names it.
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
            raise InvalidConfig(f"{path}, line {number}: no job: {line[:80]!r}", "trace") from None
        jobs.append(job)
    return sorted(jobs, key=lambda job: job.arrival)


def arrivals(
    count: int,
    rate: float,
    *,
    burstiness: float = 1.0,
    ramp_to: float | None = None,
    seed: int = 0,
) -> list[float]:
    """Times of arrival [count], seconds, the first at 0.

    Gaps are gamma distributed with the shape ``burstiness`` (vLLM's meaning: 1 is a Poisson
    process, less is burstier, infinity is a fixed rate). ``ramp_to`` moves the rate evenly from
    ``rate`` to there. An infinite rate sends everything at once.
    """
    rng = random.Random(seed)
    times: list[float] = []
    now = 0.0
    for index in range(count):
        times.append(now)
        own = rate if ramp_to is None else rate + (ramp_to - rate) * index / max(1, count - 1)
        mean = 0.0 if own == float("inf") else 1 / own
        even = burstiness == float("inf")
        now += mean if even else rng.gammavariate(burstiness, mean / burstiness) if mean else 0.0
    return times


def arriving(jobs: Sequence[Job], times: Sequence[float]) -> list[Job]:
    """The jobs, each at its time."""
    return [Job(job.prompt, job.output_tokens, time) for job, time in zip(jobs, times, strict=True)]


def varied(jobs: Sequence[Job], number: int) -> list[Job]:
    """The same jobs in other tokens: what is equal in two prompts stays equal."""
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
    return tuple(_draw(rng, count, vocabulary))


def _draw(rng: random.Random, count: int, vocabulary: int) -> Iterator[int]:
    low = min(LOWEST_TOKEN, vocabulary - 1)
    for _ in range(count):
        yield rng.randrange(low, vocabulary)
