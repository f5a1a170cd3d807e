"""Engines on a real runner in this process, with what their forwards said on record."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import quick_interpreter
from rayfin.actors.config import EngineArgs, resolve
from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import (
    EngineRequest,
    Hypothesis,
    Logprobs,
    NewRequest,
    Sampling,
    SchedulerInfo,
    StopRules,
    TokenDeltas,
)
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.parts.grammars.book import GrammarBook, Vocabulary
from rayfin.actors.runner.parts.vision.load import VisionPart
from rayfin.actors.scheduler.engine import Engine

quick_interpreter.install()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products lose more to thread hand-overs than they win."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger tiles in Triton's interpreter: its time goes by programs. tests/kernels has others."""
    if torch.cuda.is_available():
        return
    pytest.importorskip("triton")
    from rayfin.kernels.triton import products, quantized, sample

    programs = products._programs

    def large(rows: int, outputs: int, *sizes: Any) -> tuple[tuple[int], dict[str, Any]]:
        _, launch = programs(rows, outputs, *sizes)
        columns = 128
        return (-(-outputs // columns),), launch | {"COLUMNS": columns}

    monkeypatch.setattr(products, "_programs", large)
    tile = replace(quantized.PRECISE, rows=32, columns=128)
    monkeypatch.setattr(quantized, "PRECISE", tile)
    monkeypatch.setattr(sample, "BLOCK", 512)


@pytest.fixture(scope="session")
def two_layers(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Qwen 3 with two layers, as a TinyModel: the interpreter's time goes by layers as well."""
    return tiny_models.TinyModel("qwen3", tmp_path_factory.mktemp("qwen3"), num_hidden_layers=2)


def make_args(folder: Path | str, **changes: Any) -> EngineArgs:
    values: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "kv_cache_memory": 10**6,
        "max_batch_tokens": 24,
        "max_decoding_batch": 8,
        "page_size": 4,
        "max_lease": 1,  # a lease depends on measured times: tests/actors/runner/test_lease.py
    }
    if "spec_method" not in changes:  # drafts too: test_speculation.py
        values["speculative_config"] = '{"method": "none"}'
    return EngineArgs(**{**values, **changes})


class Served:
    """A model behind an engine; ``sampled`` records the logits of every sampled token.

    ``sampled[key][position]`` is [V]: what the request's token at ``position`` was drawn from.
    """

    def __init__(self, folder: Path | str, *, num_pages: int | None = None, **args: Any) -> None:
        self.args = make_args(folder, **args)
        self.runner = ModelRunner(self.args)
        config = resolve(self.args, *self.runner.profile())
        if num_pages is not None:  # of all layers
            groups = 1 if config.windows is None else config.windows.pages_per_entry
            config = replace(config, num_pages=num_pages * groups)
        self.config = config
        self.executor = InlineExecutor(self.runner, self.config)
        self.engine = Engine(self.config, self.executor)
        self.sampled: dict[int, dict[int, torch.Tensor]] = {}
        self.steps: list[SchedulerInfo] = []
        self.errors: dict[int, str] = {}
        self.reasons: dict[int, str] = {}
        self.cached: dict[int, int] = {}
        self.hypotheses: dict[int, list[Hypothesis]] = {}
        self.logprobs: dict[int, list[tuple[float, int, list[int], list[float]]]] = {}
        self.prompt_logprobs: dict[int, dict[int, tuple[float, int, list[int], list[float]]]] = {}
        self.lost = 0  # times that the runners were lost
        self._keys: dict[tuple[int, int], dict[int, int]] = {}  # of each step: handle -> key
        self._rows: list[tuple[int, int]] = []  # (key, position) that the next forward samples
        self._submit, self.executor.submit = self.executor.submit, self._record_keys
        forward = self.runner._forward
        self._advance, forward.run = forward.run, self._record_rows
        self._forward, self.runner._model.forward = self.runner._model.forward, self._record_logits

    def run(self, *requests: EngineRequest, stagger: int = 0) -> dict[int, list[int]]:
        """All requests to their end, one more every ``stagger`` steps; their tokens by key."""
        tokens: dict[int, list[int]] = {request.key: [] for request in requests}
        waiting = list(requests)
        countdown = 0
        while waiting or self.engine.has_work:
            while waiting and countdown <= 0:
                self.engine.add(waiting.pop(0))
                countdown = stagger
            countdown -= 1
            for deltas in self.engine.step().values():
                for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                    tokens[key].append(token)
                self._record_logprobs(deltas)
                for ended in deltas.ended:
                    self.cached[ended.key] = ended.cached_tokens
                    self.hypotheses[ended.key] = ended.hypotheses
                    self.reasons[ended.key] = ended.finish_reason
                    if ended.error is not None:
                        self.errors[ended.key] = str(ended.error)
        self.engine.check_integrity()
        return tokens

    def lose_runners(self, *calls: int) -> None:
        """Plants the loss of the runners, and of media encoded so far, before calls of ``step``.

        ``calls`` counts from 1. ``lost`` has how many of them there were.
        """
        step, count = self.engine.step, 0

        def step_and_lose() -> Any:
            nonlocal count
            count += 1
            if count in calls:
                self.lost += 1
                self.engine.replace_runners(RunnerGroupFailed("planted"))
                vision = self.runner._loaded.part(VisionPart)
                if vision is not None:
                    vision.encoder.clear()
            return step()

        self.engine.step = step_and_lose

    def _record_logprobs(self, deltas: TokenDeltas) -> None:
        """(log probability, rank, likeliest ids, theirs) of tokens in order, prompts by place."""
        if deltas.logprobs is not None:
            for at, entry in _entries(deltas.logprobs):
                self.logprobs.setdefault(int(deltas.keys[at]), []).append(entry)
        for key, logprobs in deltas.prompt_logprobs.items():
            entries = self.prompt_logprobs.setdefault(key, {})
            for at, entry in _entries(logprobs):
                assert at not in entries, "emitted twice"
                entries[at] = entry

    def _record_keys(self, info: SchedulerInfo) -> Any:
        keys = self.engine.lifecycle.state.running.key[info.ids].tolist()
        self._keys[info.epoch, info.step] = dict(zip(info.ids.tolist(), keys, strict=True))
        self.steps.append(info)
        return self._submit(info)

    def _record_rows(self, info: SchedulerInfo, *inputs: Any) -> Any:
        keys = self._keys[info.epoch, info.step]
        ends = (info.kv_len + info.chunk_len).tolist()
        self._rows = [
            (keys[handle], end)
            for handle, end, last in zip(info.ids.tolist(), ends, info.last_pos, strict=True)
            if last >= 0
        ]
        return self._advance(info, *inputs)

    def _record_logits(self, *inputs: Any) -> torch.Tensor:
        logits: torch.Tensor = self._forward(*inputs)
        assert len(self._rows) <= len(logits)  # more where prompts are scored
        for (key, position), row in zip(self._rows, logits, strict=False):
            self.sampled.setdefault(key, {})[position] = row.clone()
        return logits


def _entries(logprobs: Logprobs) -> Iterator[tuple[int, Any]]:
    columns = (logprobs.chosen, logprobs.rank, logprobs.ids, logprobs.values)
    for at, *entry in zip(logprobs.at, *columns, strict=True):
        yield int(at), tuple(value.tolist() for value in entry)


def make_request(
    key: int,
    prompt: Sequence[int],
    max_tokens: int = 10,
    *,
    eos: Sequence[int] = (),
    sampling: Sampling | None = None,
    guidance: Guidance | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=str(key),
        prompt=np.array(prompt, np.int32),
        sampling=sampling or Sampling(),
        stopping=StopRules(max_tokens, frozenset(eos), frozenset(eos)),
        key=key,
        parts=() if guidance is None else (guidance,),
    )


@dataclass(frozen=True)
class Row:
    """One row of a handmade step."""

    handle: int
    chunk: Sequence[int]
    kv_len: int = 0
    held: int = 1  # pages, the new ones included
    new_pages: Sequence[int] = ()
    samples: bool = True
    decoding: bool = False


def make_info(
    *rows: Row,
    step: int = 0,
    epoch: int = 0,
    new: Sequence[NewRequest] = (),
    finished: Sequence[int] = (),
) -> SchedulerInfo:
    """A SchedulerInfo of handmade rows, decoding ones first."""

    def ints(values: Any) -> np.ndarray:
        return np.array(list(values), np.int32)

    lengths = ints(len(row.chunk) for row in rows)
    decoding = sum(row.decoding for row in rows)
    return SchedulerInfo(
        epoch=epoch,
        step=step,
        ids=ints(row.handle for row in rows),
        chunk_idx=ints(np.cumsum(lengths) - lengths),
        chunk_len=lengths,
        merge_prompt=ints(token for row in rows for token in row.chunk),
        kv_len=ints(row.kv_len for row in rows),
        kv_page_len=ints(row.held for row in rows),
        last_pos=ints(len(row.chunk) - 1 if row.samples else -1 for row in rows),
        is_decoding=np.array([row.decoding for row in rows]),
        decoding_batch=decoding,
        prefill_batch=len(rows) - decoding,
        new_pages=ints(page for row in rows for page in row.new_pages),
        new_pages_len=ints(len(row.new_pages) for row in rows),
        new_requests=list(new),
        finished=list(finished),
    )


@pytest.fixture(scope="session")
def served() -> Callable[..., Served]:
    """`Served`, as a fixture: test folders hold no importable modules."""
    return Served


@pytest.fixture(scope="session")
def engine_args() -> Callable[..., EngineArgs]:
    return make_args


@pytest.fixture(scope="session")
def request_of() -> Callable[..., EngineRequest]:
    return make_request


@pytest.fixture(scope="session")
def row() -> type[Row]:
    return Row


@pytest.fixture(scope="session")
def step_of() -> Callable[..., SchedulerInfo]:
    return make_info


def poison_token(engine: Any, token: int) -> None:
    """From now on the token's embedding is NaN, on transformers' modules or on fused ones."""
    model = engine.runner._model
    if isinstance(model, CpuDecoder):
        embedding = model.packed.embedding
        embedding.fill(token, torch.full((1, embedding.inputs), float("nan")))
    else:
        model.transformer.get_input_embeddings().weight[token] = float("nan")


@pytest.fixture
def poison() -> Callable[[Any, int], None]:
    return poison_token


# Tokenizers of 128 ids and less for the tiny models: special tokens, printable ASCII, some words.

SPECIAL = ["<pad>", "<s>", "</s>", "<think>", "</think>", "<call>", "</call>", "<never>"]
WORDS = ["tr", "tru", "true", "in", '":', '",', "</", "th", "{}", "ab", "abc", "}}"]


def _tiny_backend(kind: str) -> Backend:
    """``byte_level`` as GPT-2's, or ``sentencepiece`` as Llama 2's."""
    space, newline = (" ", "\n") if kind == "sentencepiece" else ("\u0120", "\u010a")
    shown = {" ": "\u2581" if kind == "sentencepiece" else space, "\n": newline}
    letters = [shown.get(letter, letter) for letter in map(chr, range(32, 127))]
    newline = "<0x0A>" if kind == "sentencepiece" else newline
    names = [*SPECIAL, *letters, newline, *WORDS]
    vocabulary = {name: token for token, name in enumerate(names)}
    merges = [
        next(
            (word[:cut], word[cut:])
            for cut in range(len(word) - 1, 0, -1)
            if word[:cut] in vocabulary and word[cut:] in vocabulary
        )
        for word in WORDS
    ]
    if kind == "sentencepiece":
        backend = Backend(models.BPE(vocabulary, merges, unk_token="<pad>", byte_fallback=True))
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        backend = Backend(models.BPE(vocabulary, merges))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    return backend


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kind -> the folder of a tokenizer for the tiny models; its end is 2."""

    @functools.cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        fast = PreTrainedTokenizerFast(tokenizer_object=_tiny_backend(kind), eos_token="</s>")
        fast.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_book(tiny_tokenizer: Callable[[str], Path]) -> Callable[..., GrammarBook]:
    """kind, vocabulary of the model -> a new book of grammars."""

    def make(kind: str = "byte_level", size: int = 128, **settings: Any) -> GrammarBook:
        args = make_args("no model", tokenizer=str(tiny_tokenizer(kind)))
        return GrammarBook(lambda: Vocabulary.load(args, size), **settings)

    return make
