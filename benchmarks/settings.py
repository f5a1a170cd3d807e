"""What a setting of the engine gives and costs: speculation, --itl-target-ms, --kv-disk-path.

    python benchmarks/settings.py speculation --streams 1 4 16
    python benchmarks/settings.py speculation --random  # nothing is copied: what it costs
    python benchmarks/settings.py speculation --shape 0.6b --draft-shape 135m --agree 0.7
    python benchmarks/settings.py speculation --method mtp --agree 0.7
    python benchmarks/settings.py itl-target --targets 0 100 50      # 0: none
    python benchmarks/settings.py kv-disk --shape 0.6b --prompt 2000
    python benchmarks/settings.py kv-disk --nothing     # what it costs where nothing is found

speculation: beside plain decoding on the same engine and jobs, in turns. A model with random
weights says what a script says: its forward is computed, then the logits of the script's next token
are raised. A copying answer repeats spans of its prompt, with new tokens between. A draft model or
a head says the same, but for a share of the places.
itl-target: a stream beside long prompts, with and without a target: its gaps, and the chunks.
kv-disk: a prompt's first token cold, again, and after a restart. Each engine has the same random
weights. "restart" is a new engine, which finds the pages that the one before has written; its first
token is compared with that one's. With --nothing every prompt is new, and a run with the folder and
one without take turns.
"""

import argparse
import json
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
from sections import run
from shapes import SHAPES
from transformers import AutoConfig

from rayfin import LLM, SamplingParams
from rayfin.actors.config import EngineArgs, EngineConfig, resolve
from rayfin.actors.messages import EngineRequest, Sampling, SchedulerInfo, StopRules
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner, RunnerPlugins
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.speculation.draft_model import DraftedModel
from rayfin.actors.runner.speculation.heads import HeadedModel
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


def speculation() -> None:
    parser = argparse.ArgumentParser()
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


STREAM = 0
BETWEEN = 8
"""Tokens of the stream between two prompts."""


def request(key: int, tokens: int, output: int, vocabulary: int) -> EngineRequest:
    prompt = np.random.default_rng(key).integers(0, vocabulary, tokens).astype(np.int32)
    rules = StopRules(output, frozenset())
    return EngineRequest(str(key), prompt, Sampling(seed=key), rules, key=key)


def stream_beside(engine: Engine, vocabulary: int, prompts: int, length: int) -> dict[str, float]:
    """Figures of a stream that sees so many prompts of ``length`` tokens come."""
    engine.add(request(STREAM, 32, 4000, vocabulary))
    gaps, chunks, waits = list[float](), list[int](), list[float]()
    came, last, sent, since = 0.0, 0.0, 0, 0
    while sent <= prompts:
        messages = engine.step()
        now, step = time.perf_counter(), engine.lifecycle.state
        tokens = [key for deltas in messages.values() for key in deltas.keys.tolist()]
        if STREAM in tokens:
            if came and last:
                gaps.append(now - last)
                ran = engine._last_step
                chunks.append(0 if ran is None else ran.num_prefill_tokens)
            last, since = now, since + 1
        if sent and sent in tokens:
            waits.append(now - came)
            came = 0.0
        if not came and not step.running.prefilling and since >= BETWEEN:
            sent, since, came = sent + 1, 0, now
            if sent <= prompts:
                engine.add(request(sent, length, 1, vocabulary))
    engine.abort("", STREAM)
    return {
        "p50": 1000 * float(np.median(gaps)),
        "p99": 1000 * float(np.quantile(gaps, 0.99)),
        "chunk": float(np.median([count for count in chunks if count])),
        "first": 1000 * float(np.median(waits)),
    }


def itl_target() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--targets", type=float, nargs="+", default=[0, 100, 50])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--length", type=int, default=1000)
    options = parser.parse_args()
    vocabulary = SHAPES[options.shape][1]["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        save(folder, options.shape, vocabulary)
        args = EngineArgs(
            model=folder,
            load_format="dummy",
            dtype="float32",
            max_model_len=4096,
            kv_cache_memory=2**30,
            prefix_caching=False,
        )
        runner = ModelRunner(args)
        facts = runner.profile()
    print("| target | tokens of a chunk | gap, median | gap, p99 | first token of a prompt |")
    print("|---|---|---|---|---|", flush=True)
    for target in options.targets:
        config = resolve(replace(args, itl_target_ms=target or None), *facts)
        engine = Engine(config, InlineExecutor(runner, config))
        times = stream_beside(engine, vocabulary, options.prompts, options.length)
        name = f"{target:g} ms" if target else "none"
        print(
            f"| {name} | {times['chunk']:.0f} | {times['p50']:.0f} ms | {times['p99']:.0f} ms "
            f"| {times['first']:.0f} ms |",
            flush=True,
        )


def make(folder: Path, shape: str, pages: Path | None, options: argparse.Namespace) -> LLM:
    family, sizes = SHAPES[shape]
    config = {"model_type": family, "max_position_embeddings": 8192, **sizes}
    if not (folder / "config.json").exists():  # a file that changes is another model
        (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        threads=options.threads,
        max_model_len=options.prompt + 256,
        kv_cache_memory=6 << 30,
        spec_method="none",
        kv_disk_path=None if pages is None else str(pages),
    )


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds until the first token of a greedy answer, that token, and tokens found cached."""
    params, started = SamplingParams(temperature=0, max_tokens=1), time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return seconds, output.outputs[0].token_ids[0], output.num_cached_tokens or 0


def compare(folder: Path, options: argparse.Namespace) -> None:
    """The same prompt on an engine without its pages, with them, and on a new one."""
    draw, pages = random.Random(0), folder / "pages"
    times: dict[str, list[float]] = {"cold": [], "again": [], "restart": []}
    for _ in range(options.rounds):
        prompt = [draw.randrange(1000) for _ in range(options.prompt)]
        llm = make(folder, options.shape, pages, options)
        first_token(llm, [1] * 40)  # touches the weights
        answers = {}
        for kind in ("cold", "again"):
            seconds, *answers[kind] = first_token(llm, prompt)
            times[kind].append(seconds)
        llm.close()
        llm = make(folder, options.shape, pages, options)
        first_token(llm, [1] * 40)
        seconds, *answers["restart"] = first_token(llm, prompt)
        times["restart"].append(seconds)
        llm.close()
        assert len({token for token, _ in answers.values()}) == 1, answers
        assert answers["restart"][1] > options.prompt - 32, "it was not read"
    size = sum(path.stat().st_size for path in pages.rglob("*.page")) / options.rounds
    cold = statistics.median(times["cold"])
    print(f"{options.shape}, {options.prompt} tokens, {size / 2**20:.0f} MiB of files a prompt")
    for kind, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{kind:8} {1e3 * median:8.0f} ms to the first token, {median / cold:.3f} of cold")


def cost(folder: Path, options: argparse.Namespace) -> None:
    """Requests whose prompts are all new, with the folder and without."""
    draw, ratios = random.Random(0), []
    llms = {with_it: make(folder, options.shape, with_it, options) for with_it in (None, folder)}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for _ in range(options.rounds):
        seconds = {}
        for with_it, llm in llms.items():
            prompts = [[draw.randrange(1000) for _ in range(256)] for _ in range(options.streams)]
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds[with_it] = time.perf_counter() - started
        ratios.append(seconds[None] / seconds[folder])
    print(
        f"{options.shape}, {options.streams} streams: tokens a second with the folder "
        f"{statistics.median(ratios):.3f} of those without ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def kv_disk() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="135m", choices=SHAPES)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=16, help="of --nothing")
    parser.add_argument("--nothing", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (cost if options.nothing else compare)(Path(folder), options)


if __name__ == "__main__":
    run(__doc__, speculation, itl_target, kv_disk)
