"""Traces of calls: when each came, how long it was, and which blocks of its prompt others share.

A trace has no texts. Prompts are made from it: the same block id is the same block of tokens, so
that a prefix cache hits where it hit in the trace.
"""

import csv
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench.agents import Script, ScriptTurn
from rayfin.deployments.bench.workload import LOWEST_TOKEN, Job

BLOCK_TOKENS = 512  # of a block in Mooncake's traces
BURST_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type")
LOG_TYPES = {"conversation": "Conversation log", "api": "API log"}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a trace. Without ``blocks`` its prompt shares nothing."""

    arrival: float  # seconds after the first call
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # ids of the prompt's blocks; the last one may be partial


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls in order of arrival."""

    calls: list[Call]
    block_tokens: int = BLOCK_TOKENS

    @property
    def mean_prompt(self) -> float:
        return sum(call.prompt_tokens for call in self.calls) / max(1, len(self.calls))

    @property
    def mean_output(self) -> float:
        return sum(call.output_tokens for call in self.calls) / max(1, len(self.calls))

    @property
    def hit_ratio(self) -> float:
        """The share of prompt tokens that a cache without a limit would have seen before."""
        seen: set[int] = set()
        hits = 0
        for call in self.calls:
            blocks = 0
            while blocks < len(call.blocks) and call.blocks[blocks] in seen:
                blocks += 1
            hits += min(blocks * self.block_tokens, call.prompt_tokens)
            seen.update(call.blocks)
        return hits / max(1, sum(call.prompt_tokens for call in self.calls))

    def fitted(self, max_model_len: int) -> "Trace":
        """The trace with all lengths and blocks scaled down until its longest call fits.

        Prefixes shrink as prompts do, so ``hit_ratio`` stays what it is, but for rounding.

        Raises:
            InvalidConfig: a block would have less than a token.
        """
        longest = max(call.prompt_tokens + call.output_tokens for call in self.calls)
        if longest <= max_model_len:
            return self
        old = self.block_tokens
        new = old * (max_model_len - 1) // longest  # a length of 0 becomes 1
        if new < 1:
            raise InvalidConfig(
                f"max_model_len {max_model_len} is too small: the trace has a call of {longest} "
                f"tokens, and blocks of {old} tokens would have none",
                "max_model_len",
            )
        calls = [
            replace(
                call,
                prompt_tokens=max(1, call.prompt_tokens * new // old),
                output_tokens=max(1, call.output_tokens * new // old),
            )
            for call in self.calls
        ]
        return Trace(calls, new)

    def jobs(self, *, vocabulary: int, seed: int = 0) -> list[Job]:
        """A job for each call. Tokens of a block are drawn from its id and ``seed``."""
        tokens = list(range(min(LOWEST_TOKEN, vocabulary - 1), vocabulary))
        known: dict[int, list[int]] = {}

        def block(number: int) -> list[int]:
            if number not in known:
                rng = random.Random(f"{seed}/{number}")
                known[number] = rng.choices(tokens, k=self.block_tokens)
            return known[number]

        def prompt(place: int, call: Call) -> tuple[int, ...]:
            if not call.blocks:
                rng = random.Random(f"{seed}/call/{place}")
                return tuple(rng.choices(tokens, k=call.prompt_tokens))
            whole = [token for number in call.blocks for token in block(number)]
            return tuple(whole[: call.prompt_tokens])

        return [
            Job(prompt(place, call), call.output_tokens, call.arrival)
            for place, call in enumerate(self.calls)
        ]


@dataclass(frozen=True, slots=True)
class BurstFilter:
    """Which calls of a BurstGPT file count: of a model, and of a type of log; None: all."""

    model: str | None = None  # "ChatGPT" or "GPT-4"
    log: str | None = None  # a key of LOG_TYPES

    def takes(self, row: dict[str, str]) -> bool:
        return (self.model is None or row["Model"] == self.model) and (
            self.log is None or row["Log Type"] == LOG_TYPES[self.log]
        )


def is_burst_file(path: Path) -> bool:
    """Whether the file's first line is the head of a BurstGPT table."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        head = file.readline()
    return all(column in head for column in BURST_COLUMNS[:1] + BURST_COLUMNS[2:4])


def read_burst(path: Path, wanted: BurstFilter | None = None, limit: int | None = None) -> Trace:
    """Reads BurstGPT's CSV: Timestamp in seconds, Model, Request tokens, Response tokens, Log Type.

    Columns are found by their names, for later files have more of them. Calls without a prompt or
    an answer failed in their service and are left out. Source: Wang et al., "BurstGPT: A Real-World
    Workload Dataset to Optimize LLM Serving Systems", KDD 2025.

    Raises:
        InvalidConfig: a column is missing or a line is malformed; the message names it.
    """
    wanted = wanted or BurstFilter()
    reader = _Rows(path)
    calls: list[Call] = []
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        table = csv.DictReader(file)
        for column in BURST_COLUMNS:
            if column not in (table.fieldnames or ()):
                raise reader.error(1, f"the column {column!r} is missing")
        for row in table:
            if not wanted.takes(row):
                continue
            line = table.line_num
            prompt = reader.number(line, row, "Request tokens", int)
            output = reader.number(line, row, "Response tokens", int)
            if prompt and output:
                arrival = reader.number(line, row, "Timestamp", float)
                calls.append(Call(arrival, prompt, output))
            if limit is not None and len(calls) == limit:
                break
    return reader.trace(calls, BLOCK_TOKENS)


def read_mooncake(path: Path, block_tokens: int = BLOCK_TOKENS, limit: int | None = None) -> Trace:
    """Reads Mooncake's JSON lines: timestamp in ms, input_length, output_length, hash_ids.

    Without ``hash_ids`` a prompt shares nothing. Source: Qin et al., "Mooncake: Trading More
    Storage for Less Computation — A KVCache-centric Architecture for Serving LLM Chatbot", FAST
    2025.

    Raises:
        InvalidConfig: a line is malformed; the message names it and the field.
    """
    reader = _Rows(path)
    calls: list[Call] = []
    for line, entry in reader.objects():
        call = Call(
            arrival=reader.number(line, entry, "timestamp", float) / 1000,
            prompt_tokens=reader.number(line, entry, "input_length", int, least=1),
            output_tokens=reader.number(line, entry, "output_length", int, least=1),
            blocks=_block_ids(reader, line, entry),
        )
        needed = -(-call.prompt_tokens // block_tokens)
        if call.blocks and len(call.blocks) < needed:
            raise reader.error(
                line,
                f"input_length {call.prompt_tokens} needs {needed} hash_ids of {block_tokens} "
                f"tokens, got {len(call.blocks)} (blocks of another size: "
                "--timed-trace-chunk-hash-size)",
            )
        calls.append(replace(call, blocks=call.blocks[:needed]))
        if limit is not None and len(calls) == limit:
            break
    return reader.trace(calls, block_tokens)


def read_sessions(path: Path, limit: int | None = None) -> tuple[Script, ...]:
    """Reads sessions of coding agents: JSON lines with ``requests``, as Weka publishes them.

    A request has ``t`` (seconds), ``in`` and ``out`` (tokens), and ``think_time`` or ``api_time``
    (seconds). An entry of the type ``subagent`` has ``requests`` of its own, which
    the request after it waits for. A prompt that is shorter than the one before it begins anew.

    Raises:
        InvalidConfig: a line is malformed; the message names it and the field.
    """
    reader = _Rows(path)
    scripts: list[Script] = []
    for line, entry in reader.objects():
        if script := _script(reader, line, entry):
            scripts.append(script)
        if limit is not None and len(scripts) == limit:
            break
    if not scripts:
        raise InvalidConfig(f"{path}: no session has a request")
    return tuple(scripts)


def _script(reader: "_Rows", line: int, entry: dict[str, Any]) -> Script:
    requests = entry.get("requests")
    if not isinstance(requests, list) or not all(isinstance(each, dict) for each in requests):
        raise reader.error(line, f"requests must be a list of objects, got {_short(requests)}")
    turns: list[ScriptTurn] = []
    children: list[Script] = []
    known, ended = 0, None  # tokens of the context, and when the last answer was complete
    for each in requests:
        if each.get("type") == "subagent":
            if child := _script(reader, line, each):
                children.append(child)
            continue
        prompt = reader.number(line, each, "in", int, least=1)
        output = max(1, reader.number(line, each, "out", int))
        starts = reader.number(line, each, "t", float)
        pause = 0.0 if ended is None else max(0.0, starts - ended)
        if each.get("think_time") is not None:
            pause = reader.number(line, each, "think_time", float)
        fresh = prompt < known
        added = prompt if fresh else max(1, prompt - known)
        turns.append(ScriptTurn(pause, added, output, fresh, tuple(children)))
        children, known = [], prompt + output
        taken = each.get("api_time")
        ended = starts + (0.0 if taken is None else reader.number(line, each, "api_time", float))
    return tuple(turns)


def is_mooncake_file(path: Path) -> bool:
    """Whether the file's first line that is not blank is an object with a ``timestamp``."""
    with path.open(errors="replace") as file:
        first = next((line for line in file if line.strip()), "")
    return first.lstrip().startswith("{") and '"timestamp"' in first


def _block_ids(reader: "_Rows", line: int, entry: dict[str, Any]) -> tuple[int, ...]:
    ids = entry.get("hash_ids", [])
    if not isinstance(ids, list) or any(type(block_id) is not int for block_id in ids):
        raise reader.error(line, f"hash_ids must be a list of integers, got {_short(ids)}")
    return tuple(ids)


@dataclass(slots=True)
class _Rows:
    """Reads numbers out of a file's lines, with errors that name the line and the field."""

    path: Path

    def objects(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Each line that is not blank as a JSON object, with its number from 1."""
        with self.path.open(errors="replace") as file:
            for line, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                try:
                    entry = json.loads(text)
                except ValueError as error:
                    raise self.error(line, f"is not JSON: {error}") from None
                if not isinstance(entry, dict):
                    raise self.error(line, f"a JSON object is expected, got {_short(entry)}")
                yield line, entry

    def number(
        self,
        line: int,
        row: dict[str, Any],
        name: str,
        kind: Callable[[Any], Any],
        least: float = 0,
    ) -> Any:
        """A field as a number of at least ``least``."""
        value = row.get(name)
        if value is None:
            raise self.error(line, f"{name} is missing")
        try:
            number = kind(value)
            if isinstance(value, bool) or number != float(value) or not least <= number < 1e12:
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            raise self.error(
                line,
                f"{name} must be {'an integer' if kind is int else 'a number'} of at least "
                f"{least:g}, got {_short(value)}",
            ) from None
        return number

    def error(self, line: int, problem: str) -> InvalidConfig:
        return InvalidConfig(f"{self.path}, line {line}: {problem}")

    def trace(self, calls: Sequence[Call], block_tokens: int) -> Trace:
        """The calls in order, from 0 s.

        Raises:
            InvalidConfig: there are none.
        """
        if not calls:
            raise InvalidConfig(f"{self.path} has no calls")
        first = min(call.arrival for call in calls)
        moved = (replace(call, arrival=call.arrival - first) for call in calls)
        return Trace(sorted(moved, key=lambda call: call.arrival), block_tokens)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
