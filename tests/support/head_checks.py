"""Engines with a head that drafts: what they say, and what the head has proposed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from loaded_once import make_runner
from rayfin.actors.config import resolve
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.actors.parts import RequestPart
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.speculation.heads import HeadProposer
from rayfin.actors.scheduler.engine import Engine

PROMPTS = [[15, 9, 30, 15, 9, 30, 15, 9], [17, 17, 60, 20, 44, 31, 8, 17, 90], [11, 12], [5] * 40]
OUTPUT = 20
RULES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9},
    "penalty": {"temperature": 0.5, "repetition_penalty": 1.3},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0},
    "grammar": {"parts": [Guidance(grammar="start: ROW+\nROW: /[a-d]{1,3}=[0-9]{1,4};/")]},
}


def headed(args: Any, method: str, folder: Path | None = None, **settings: Any) -> Any:
    """The settings with a head that drafts."""
    written = {"method": method, "num_speculative_tokens": 4, "adaptive": False, **settings}
    if folder is not None:
        written["model"] = str(folder)
    return replace(args, speculative_config=json.dumps(written))


def requests_of(
    sampling: Sampling, first: int = 0, parts: tuple[RequestPart, ...] = ()
) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(key),
            prompt=np.array(prompt, np.int32),
            sampling=replace(sampling, seed=key),
            stopping=StopRules(OUTPUT, frozenset()),
            key=first + key,
            parts=parts,
        )
        for key, prompt in enumerate(PROMPTS)
    ]


def ruled(rule: str) -> list[EngineRequest]:
    """Requests with one of RULES."""
    settings = dict(RULES[rule])
    parts = tuple(settings.pop("parts", ()))
    return requests_of(Sampling(**settings), parts=parts)


def engine_of(args: Any, **changes: Any) -> tuple[Engine, ModelRunner]:
    runner = make_runner(args)
    config = replace(resolve(args, *runner.profile()), **changes)
    return Engine(config, InlineExecutor(runner, config)), runner


def finish(engine: Engine, requests: list[EngineRequest]) -> tuple[dict[int, list[int]], list[Any]]:
    """The tokens of each request, and all log probabilities."""
    tokens: dict[int, list[int]] = {request.key: [] for request in requests}
    scores: list[Any] = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for deltas in engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
            found = list(deltas.prompt_logprobs.items())
            if deltas.logprobs is not None:
                keys = deltas.keys[deltas.logprobs.at].tolist()
                logprobs = deltas.logprobs
                values = zip(keys, logprobs.ids.tolist(), logprobs.values.tolist(), strict=True)
                scores += list(values)
            scores += [(key, own.ids.tolist(), own.values.tolist()) for key, own in found]
            assert all(ended.error is None for ended in deltas.ended)
    engine.check_integrity()
    return tokens, sorted(scores, key=lambda entry: entry[0])


def share_right(engine: Engine) -> float:
    stats = engine.stats()
    assert stats.spec_draft_tokens
    return stats.spec_accepted_tokens / stats.spec_draft_tokens


def watch(runner: ModelRunner) -> list[tuple[list[int], list[int]]]:
    """From now on the texts that get drafts, and the drafts."""
    assert runner._execution is not None
    speculator = runner._execution.speculator
    assert speculator is not None
    proposer = speculator._proposer
    assert isinstance(proposer, HeadProposer)
    propose, seen = proposer.propose, []

    def watched(slots: Any, room: Any) -> Any:
        drafts = propose(slots, room)
        for row, slot in enumerate(slots.tolist()):
            text = proposer._texts.tokens[slot, : proposer._texts.lengths[slot]].tolist()
            seen.append((text, drafts.tokens[row, : drafts.lengths[row]].tolist()))
        return drafts

    proposer.propose = watched  # type: ignore[method-assign]
    return seen
