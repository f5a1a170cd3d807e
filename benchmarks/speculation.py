"""Speculation beside plain decoding on the same engine and jobs, in turns.

    python benchmarks/speculation.py --streams 1 4 16
    python benchmarks/speculation.py --random           # nothing is copied: what it costs
    python benchmarks/speculation.py --shape 0.6b --draft-shape 135m --agree 0.7
    python benchmarks/speculation.py --method mtp --agree 0.7

A model with random weights says what a script says: its forward is computed, then the logits of
the script's next token are raised. A copying answer repeats spans of its prompt, with new tokens
between. A draft model or a head says the same, but for a share of the places.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES
from transformers import AutoConfig

from rayfin.actors.config import EngineArgs, EngineConfig, resolve
from rayfin.actors.messages import EngineRequest, Sampling, SchedulerInfo, StopRules
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.plugins import RunnerPlugins
from rayfin.actors.runner.proposers.draft_model import DraftedModel
from rayfin.actors.runner.proposers.heads import HeadedModel
from rayfin.actors.runner.step.batch import StepInputs
from rayfin.actors.scheduler.engine import Engine

PROMPT, OUTPUT, VOCABULARY = 128, 128, 2000


@dataclass
class Scripts(Observer):
    """What each request says, by slot; the prompt's own tokens come first."""

    texts: dict[int, np.ndarray]  # by seed
    of_slot: dict[int, np.ndarray]

    def before(self, info: SchedulerInfo) -> None:
        for new in info.new_requests:
            if new.sampling.seed in self.texts:
                self.of_slot[new.handle] = self.texts[new.sampling.seed]


class ScriptedModel:
    """A model that computes, and then says what the script says ``ahead`` of the last position."""

    def __init__(
        self, model: StepModel, scripts: Scripts, right: float = 1.0, ahead: int = 1
    ) -> None:
        self._model, self._scripts, self._right, self._ahead = model, scripts, right, ahead
        self.layouts, self.dtype = model.layouts, model.dtype

    def bind(self, cache: Any) -> None:
        self._model.bind(cache)

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        logits = self._model.forward(inputs)
        if inputs.slots is None or not self._scripts.of_slot:
            return logits
        starts = np.asarray(inputs.batch.query_start_cpu)
        places = inputs.sampled.numpy()
        rows = np.searchsorted(starts, places, side="right") - 1
        positions = inputs.batch.positions.numpy()[places] + self._ahead
        for at, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            text = self._scripts.of_slot.get(int(inputs.slots[row]))
            if text is not None and position < len(text):
                wrong = (position * 7919 + int(text[0])) % 1000 >= 1000 * self._right
                logits[at, int(text[position]) + wrong] = 1e6
        return logits


def copying(rng: random.Random, copied: float) -> tuple[list[int], list[int]]:
    """A prompt, and an answer of which so much is copied from it in spans."""
    prompt = [rng.randrange(VOCABULARY) for _ in range(PROMPT)]
    answer: list[int] = []
    while len(answer) < OUTPUT:
        span = rng.randint(8, 24)
        start = rng.randrange(PROMPT - span)
        answer += prompt[start : start + span]
        answer += [rng.randrange(VOCABULARY) for _ in range(round(span * (1 - copied) / copied))]
    return prompt, answer[:OUTPUT]


class Bench:
    """One model, and engines on it with and without speculation."""

    def __init__(self, folder: Path, settings: dict[str, Any], agree: float) -> None:
        self.scripts = Scripts({}, {})
        plugins = RunnerPlugins(
            observers=(self.scripts,), wrap_model=lambda model: ScriptedModel(model, self.scripts)
        )
        plain = EngineArgs(
            model=str(folder),
            load_format="dummy",
            dtype="float32",
            max_model_len=2048,
            kv_cache_memory=2**30,
            spec_method="none",
        )
        drafting = EngineArgs.from_dict({**_dict(plain), **settings})
        self.args = {"plain": plain, "drafting": drafting}
        runner = ModelRunner(drafting, plugins=plugins)
        self.runners = {"plain": runner, "drafting": runner}
        model: Any = runner._loaded.model
        if isinstance(model, DraftedModel):
            model.draft = ScriptedModel(model.draft, self.scripts, agree)
        if isinstance(model, HeadedModel):  # which reads states of plain steps too
            model.head = ScriptedModel(model.head, self.scripts, agree, ahead=2)
            self.runners["plain"] = ModelRunner(plain, plugins=plugins)
        self.facts = {name: runner.profile() for name, runner in self.runners.items()}

    def run(self, name: str, jobs: Sequence[tuple[list[int], list[int] | None]]) -> Any:
        """(tokens a second, engine) of the jobs at once; their decode phase alone."""
        config: EngineConfig = resolve(replace(self.args[name], max_lease=1), *self.facts[name])
        self.scripts.of_slot.clear()
        self.scripts.texts = {
            seed: np.array([*prompt, *answer], np.int32)
            for seed, (prompt, answer) in enumerate(jobs)
            if answer is not None
        }
        engine = Engine(config, InlineExecutor(self.runners[name], config))
        for seed, (prompt, _) in enumerate(jobs):
            engine.add(
                EngineRequest(
                    request_id=str(seed),
                    prompt=np.array(prompt, np.int32),
                    sampling=Sampling(seed=seed),
                    stopping=StopRules(OUTPUT),
                    key=seed,
                )
            )
        count, started, tokens = 0, 0.0, {seed: list[int]() for seed in range(len(jobs))}
        while engine.has_work:
            for deltas in engine.step().values():
                for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                    tokens[key].append(token)
                if all(tokens.values()):
                    started = started or time.perf_counter()
                    count += len(deltas.tokens)
        return count / (time.perf_counter() - started), tokens, engine.stats()


def save(folder: str, shape: str, vocabulary: int) -> None:
    """Writes a model's configuration."""
    architecture, sizes = SHAPES[shape]
    settings = {"tie_word_embeddings": True, "max_position_embeddings": 8192, **sizes}
    settings["vocab_size"] = vocabulary
    AutoConfig.for_model(architecture, **settings).save_pretrained(folder)


def _dict(args: EngineArgs) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in fields(args)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copied", type=float, default=0.8)
    parser.add_argument("--random", action="store_true")
    parser.add_argument("--method", default="ngram")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--draft-shape", choices=SHAPES, help="drafts with a model of this shape")
    parser.add_argument("--agree", type=float, default=0.7, help="share of its right tokens")
    options = parser.parse_args()
    settings = {"spec_method": options.method, "spec_tokens": options.tokens}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as small:
        shape = options.draft_shape or options.shape
        vocabulary = SHAPES[shape][1]["vocab_size"]  # of both
        save(folder, options.shape, vocabulary)
        if options.draft_shape:
            save(small, options.draft_shape, vocabulary)
            settings |= {"spec_method": "draft_model", "spec_model": small}
        bench = Bench(Path(folder), settings, options.agree)
    print("| streams | plain tokens/s | drafting tokens/s | ratio | drafts right |")
    print("|---|---|---|---|---|", flush=True)
    for streams in options.streams:
        rates: dict[str, list[float]] = {"plain": [], "drafting": []}
        share = 0.0
        for number in range(options.rounds):
            rng = random.Random(number)
            jobs: list[Any] = [copying(rng, options.copied) for _ in range(streams)]
            if options.random:
                jobs = [(prompt, None) for prompt, _ in jobs]
            said = {}
            for name in ("plain", "drafting") if number % 2 else ("drafting", "plain"):
                rate, said[name], stats = bench.run(name, jobs)
                rates[name].append(rate)
                if stats.spec_draft_tokens:
                    share = stats.spec_accepted_tokens / stats.spec_draft_tokens
            assert said["plain"] == said["drafting"], "speculation changed a token"
        medians = [statistics.median(rates[name]) for name in ("plain", "drafting")]
        pairs = zip(rates["plain"], rates["drafting"], strict=True)
        ratio = statistics.median(drafting / plain for plain, drafting in pairs)
        speeds = " | ".join(f"{rate:.1f}" for rate in medians)
        print(f"| {streams} | {speeds} | {ratio:.2f} | {share:.0%} |", flush=True)


if __name__ == "__main__":
    main()
