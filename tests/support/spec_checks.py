"""Engines that speculate beside plain ones, and a proposer that reads the future."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from loaded_once import make_runner
from rayfin.actors.config import EngineConfig, resolve
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import (
    EngineRequest,
    Int32Array,
    Int64Array,
    Logprobs,
    NewRequest,
    Sampling,
    StopRules,
)
from rayfin.actors.parts import RequestPart
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import RunnerPlugins
from rayfin.actors.runner.speculation.interface import Drafts, TokenTable
from rayfin.actors.scheduler.engine import Engine

OUTPUT = 18
PROMPTS = [[15, 9, 30, 15, 9, 30, 15, 9], [17, 17, 60, 20, 44, 31, 8, 17, 90], [11, 12], [5] * 9]
ROWS = "start: ROW+\nROW: /[a-d]{1,3}=[0-9]{1,4};/"

RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9},
    "filtered": {"temperature": 1.1, "top_k": 40, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.7, "temperature": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.4},
    "logit_bias": {"logit_bias": ((7, 3.0), (9, -4.0))},
    "bad_words": {"bad_words": ((15, 9), (31,))},
    "min_tokens": {"banned": (2, 7, 31), "banned_until": 16},
    "allowed": {"allowed": (5, 7, 9, 11, 60)},
    "logprobs": {"logprobs": 3, "temperature": 0.6},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "grammar": {"parts": [Guidance(grammar=ROWS, ends=(2,))]},
}


class Future:
    """Knows what each prompt goes on with, and says it right with a chance of ``right``."""

    streams: list[list[int]] = []
    right = 1.0

    def __init__(self) -> None:
        self.texts = TokenTable(8, 256)
        self.random = np.random.default_rng(0)

    def add(self, slot: int, request: NewRequest) -> None:
        assert request.history is not None
        self.texts.add(slot, request.history)

    def remove(self, slot: int) -> None:
        self.texts.remove(slot)

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        for row, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            for token in tokens[row, :count]:
                self.texts.append(np.array([slot]), np.array([token], np.int32))

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        tokens = np.zeros((len(slots), int(room.max())), np.int32)
        for row, slot in enumerate(slots.tolist()):
            known = self.texts.tokens[slot, : self.texts.lengths[slot]].tolist()
            stream = next((own for own in self.streams if own[: len(known)] == known), known)
            rest = stream[len(known) :][: tokens.shape[1]]
            tokens[row, : len(rest)] = rest
            wrong = self.random.random(tokens.shape[1]) >= self.right
            tokens[row, wrong] = (tokens[row, wrong] + 1) % 100
        return Drafts(tokens, room)


Outcome = tuple[dict[int, list[int]], dict[int, list[Any]], dict[int, str]]


def run(
    args: Any,
    requests: list[EngineRequest],
    proposer: Any = None,
    *,
    disturb: Callable[[Engine], None] | None = None,
    **changes: Any,
) -> tuple[Outcome, Engine]:
    """(tokens, log probabilities, how it ended) of each request; and the engine.

    ``disturb`` is called before each step.
    """
    runner = make_runner(args, RunnerPlugins(proposer=proposer))
    config: EngineConfig = replace(resolve(args, *runner.profile()), **changes)
    engine = Engine(config, InlineExecutor(runner, config))
    tokens: dict[int, list[int]] = {request.key: [] for request in requests}
    scores: dict[int, list[Any]] = {request.key: [] for request in requests}
    ends: dict[int, str] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        if disturb is not None:
            disturb(engine)
        for deltas in engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
            if deltas.logprobs is not None:
                for at, entry in _entries(deltas.logprobs):
                    scores[int(deltas.keys[at])].append(entry)
            for key, prompt in deltas.prompt_logprobs.items():
                scores[key] += list(_entries(prompt))
            for ended in deltas.ended:
                ends[ended.key] = f"{ended.finish_reason} {ended.stop_reason} {ended.error}"
    engine.check_integrity()
    return (tokens, scores, ends), engine


def _entries(logprobs: Logprobs) -> Any:
    columns = (logprobs.chosen, logprobs.rank, logprobs.ids, logprobs.values)
    for at, *entry in zip(logprobs.at.tolist(), *(c.tolist() for c in columns), strict=True):
        yield at, entry


def requests_of(
    sampling: Sampling,
    max_tokens: int = OUTPUT,
    stop: tuple[int, ...] = (),
    parts: tuple[RequestPart, ...] = (),
) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(key),
            prompt=np.array(prompt, np.int32),
            sampling=replace(sampling, seed=key),
            stopping=StopRules(max_tokens, frozenset(stop)),
            key=key,
            parts=parts,
        )
        for key, prompt in enumerate(PROMPTS)
    ]


def ruled(rule: str, max_tokens: int = OUTPUT) -> list[EngineRequest]:
    """Requests with one of RULES."""
    settings = dict(RULES[rule])
    parts = tuple(settings.pop("parts", ()))
    return requests_of(Sampling(**settings), max_tokens, parts=parts)


def speculating(args: Any, **settings: Any) -> Any:
    written = {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False, **settings}
    return replace(args, speculative_config=json.dumps(written))


def known_future(outcome: Outcome, right: float = 1.0) -> type[Future]:
    streams = [[*PROMPTS[key], *tokens] for key, tokens in outcome[0].items()]
    return type("Known", (Future,), {"streams": streams, "right": right})
