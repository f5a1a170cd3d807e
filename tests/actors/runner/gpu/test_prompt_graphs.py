"""Layers of steps with prompts as graphs: buckets, tile maps, and what eager layers compute.

On a CPU the layers are not recorded and run in Triton's interpreter; all else is the same.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.batch import StepInputs, build_inputs
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.sampling import select as sampling_select
from rayfin.kernels.shapes import PagedBatch

pytest.importorskip("triton")
from rayfin.actors.runner.gpu import experts
from rayfin.actors.runner.gpu import prompt_graphs as module
from rayfin.actors.runner.gpu.decoder import GpuDecoder, build_gpu_decoder
from rayfin.actors.runner.gpu.experts import group_experts
from rayfin.actors.runner.gpu.graphs import CudaRecorder
from rayfin.actors.runner.gpu.prompt_graphs import PromptGraphs, StepLaunches, token_buckets
from rayfin.actors.runner.gpu.prompt_steps import row_buckets
from rayfin.kernels.attention.triton_backend import Sizes, TritonAttention

Make = Callable[..., Any]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
PAGE_SIZE, PAGES, MAX_ROWS, MAX_TOKENS = 4, 32, 4, 32
TABLE = 12  # pages of a request at most


def test_buckets() -> None:
    """Ascending, and a step is not padded to more than twice its tokens."""
    assert token_buckets(3, 64) == [1, 2, 3]
    assert token_buckets(24, 64) == [1, 2, 4, 8, 16, 24]
    narrow, wide = token_buckets(8192, 1024), token_buckets(8192, 4096)
    assert narrow[-1] == 3072 and wide[-1] == 768 and set(wide) < set(narrow)
    assert narrow == sorted(set(narrow)) and token_buckets(512, 1024)[-1] == 512
    assert all(larger <= 2 * size for size, larger in zip(narrow, narrow[1:], strict=False))
    assert [row_buckets(rows) for rows in (1, 2, 6)] == [[1], [1, 2], [1, 2, 4, 6]]
    assert row_buckets(512)[-2:] == [256, 512]


def batch_of(rows: Sequence[tuple[int, int]], decoding: int) -> PagedBatch:
    """Of rows (cached, chunk), as far as tile maps read it."""
    chunks = np.array([chunk for _, chunk in rows], np.int32)
    lengths = np.array([cached for cached, _ in rows], np.int32) + chunks
    fields = {"query_start_cpu": np.append(0, np.cumsum(chunks)), "kv_len_cpu": lengths}
    return SimpleNamespace(**fields, decoding=decoding, rows=len(rows))  # type: ignore[return-value]


@settings(max_examples=60)
@given(
    decodes=st.lists(st.integers(0, 5000), max_size=20),
    prompts=st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 200)), max_size=20),
    cores=st.sampled_from([1, 16, 132]),
    window=st.sampled_from([None, 100]),
)
def test_tile_maps_are_those_of_an_eager_step(
    decodes: list[int], prompts: list[tuple[int, int]], cores: int, window: int | None
) -> None:
    """As long as there is room to split; then tiles are split less. Nothing stale is left."""
    attention = TritonAttention(torch.device("cpu"))
    attention.cores = cores
    sizes = Sizes(4, 2, 16, 16, torch.float32, window)
    launches = StepLaunches(attention, [sizes], 1024, 32, torch.device("cpu"))
    rows = [*((cached, 1) for cached in decodes), *prompts]
    tokens = sum(chunk for _, chunk in rows)
    bucket = next((size for size in token_buckets(1024, 64) if size >= tokens), None)
    if not rows or bucket is None or len(rows) > 32:
        return
    batch = batch_of(rows, len(decodes))
    launches._pairs[sizes].items.fill_(-7)  # of a step before
    fits = launches.fill(bucket, batch)
    every = launches.of(bucket, False, attention, batch, sizes)
    parts = slice(0, len(decodes)), slice(len(decodes), len(rows))
    shapes = attention.decode_shape(sizes), attention.prefill_shape(sizes)
    whole = [
        attention.tile_map(shape, sizes, batch, own)
        for shape, own in zip(shapes, parts, strict=True)
    ]
    tiles = [int(tile_map.items[:, 7].sum()) for tile_map in whole]
    assert fits == (tiles[1] < len(every[1].items))
    if not fits:
        return
    for launch, wanted, shape in zip(every, whole, shapes, strict=True):
        assert launch.items.data_ptr() % 16 == 0 and len(launch.arrived) == 2 * shape.programs
        used = launch.items[launch.items[:, 2] > 0].numpy()
        assert not launch.items[len(used) :].any()
        assert used[:, 6].max(initial=-1) < len(launch.arrived)
        if len(wanted.items) <= len(launch.items):
            assert (used[:, :6] == wanted.items[:, :6]).all()
        queries = [(row, token) for row, token, *_, first in used[:, [0, 1, 7]].tolist() if first]
        owned = {(row, token) for row, token in wanted.items[:, :2].tolist()}
        assert len(queries) == len(set(queries)) and set(queries) == owned


def test_more_prompts_than_places_are_left_to_eager_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SPARE_TILES", 0)
    attention = TritonAttention(torch.device("cpu"))
    sizes = Sizes(4, 2, 16, 16, torch.float32, None)
    launches = StepLaunches(attention, [sizes], 16, 32, torch.device("cpu"))
    assert launches.fill(16, batch_of([(300, 1)] * 7, 0))
    assert not launches.fill(16, batch_of([(300, 1)] * 8, 0))
    assert launches.fill(16, batch_of([(300, 1)] * 8, 8)), "decodes have a place each"


class Steps:
    """Steps of handmade rows by eager layers and by graphs, on the same pages."""

    def __init__(self, decoder: GpuDecoder, row: Make, step_of: Make) -> None:
        self.decoder = decoder
        self.cache = KVTensors(decoder.layouts, PAGES, PAGE_SIZE, decoder.dtype, DEVICE)
        for pages in (*self.cache.keys, *self.cache.values):
            pages.fill_(float("nan"))  # what a row may not see
        decoder.bind(self.cache)
        self.graphs = PromptGraphs(
            decoder,
            CudaRecorder() if ON_GPU else lambda work: work,
            max_tokens=MAX_TOKENS,
            max_rows=MAX_ROWS,
            pages_per_request=TABLE,
            page_size=PAGE_SIZE,
            device=DEVICE,
        )
        assert all(torch.isnan(pages).all() for pages in self.pages), "recording wrote"
        self._row, self._step_of = row, step_of
        self._slots = RequestSlots(MAX_ROWS, TABLE)
        self._free = list(range(PAGES))
        self._lengths: dict[int, int] = {}

    @property
    def pages(self) -> list[torch.Tensor]:
        return [*self.cache.keys, *self.cache.values]

    def inputs(self, rows: dict[int, Sequence[int]], decoding: Sequence[int] = ()) -> StepInputs:
        """A step with the tokens of each slot of ``rows``; those ``decoding`` come first."""
        made, new = [], []
        for slot, tokens in rows.items():
            if slot not in self._lengths:
                new.append(NewRequest(slot, Sampling(), cap=100))
            cached = self._lengths.get(slot, 0)
            held, wanted = (-(-count // PAGE_SIZE) for count in (cached, cached + len(tokens)))
            pages = [self._free.pop() for _ in range(wanted - held)]
            fields = {"held": wanted, "new_pages": pages, "decoding": slot in decoding}
            made.append(self._row(slot, tokens, cached, **fields))
            self._lengths[slot] = cached + len(tokens)
        info = self._step_of(*made, new=new)
        self._slots.apply(info)
        return build_inputs(info, self._slots, PAGE_SIZE, DEVICE)[0]

    def compare(self, inputs: StepInputs, bucket: int | None) -> None:
        """Logits and pages are those of eager layers, and the ``bucket``'s graph has run."""
        before = [pages.clone() for pages in self.pages]
        self.decoder.replay = None
        wanted = self.decoder.forward(inputs)
        after = [pages.clone() for pages in self.pages]
        for pages, old in zip(self.pages, before, strict=True):
            pages.copy_(old)
        streams: list[torch.Tensor | None] = []

        def replay(own: StepInputs) -> torch.Tensor | None:
            streams.append(self.graphs.replay(own))
            return streams[-1]

        self.decoder.replay = replay
        inputs.batch.scratch.clear()
        given = self.decoder.forward(inputs)
        (stream,) = streams
        assert (None if stream is None else len(stream)) == bucket
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
        assert not given.isnan().any()
        for pages, own in zip(self.pages, after, strict=True):
            torch.testing.assert_close(pages, own, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "mixtral"])
def test_what_eager_layers_compute(
    family: str,
    two_layers: Any,
    tiny_model: Make,
    row: Make,
    step_of: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts, chunks, decodes, drafts; windows and experts; a larger step leaves nothing behind.

    All pages that no row may see hold no number. Padding is routed to no expert.
    """
    padded: set[int | None] = set()

    def run_experts(*given: Any) -> torch.Tensor:
        padded.add(None if given[-1] is None else int((given[-1] < 0).sum()))
        return run(*given)

    run = experts.run_experts
    monkeypatch.setattr(experts, "run_experts", run_experts)
    tiny = two_layers if family == "qwen3" else tiny_model(family)
    model: Any = AutoModelForCausalLM.from_pretrained(tiny.folder, attn_implementation=ATTENTION)
    paged = PagedModel(model.to(DEVICE).eval().requires_grad_(False), paged_attention)
    assert group_experts(paged) == (family == "mixtral")
    decoder = build_gpu_decoder(paged, TritonAttention(DEVICE))
    assert decoder is not None
    steps = Steps(decoder, row, step_of)
    steps.compare(steps.inputs({0: [5, 6, 7, 9, 2]}), 8)
    steps.compare(steps.inputs({0: [8], 1: range(3, 23)}, decoding=[0]), 32)
    steps.compare(steps.inputs({0: [3], 1: [4], 2: [9, 9, 4]}, decoding=[0, 1]), 8)
    steps.compare(steps.inputs({2: [7], 0: [1], 1: [6]}, decoding=[2, 0]), 4)
    steps.compare(steps.inputs({1: range(30, 45), 3: range(2, 19)}), 32)
    drafts = steps.inputs({0: [2, 3, 4], 1: [5], 3: [6, 7]})
    assert drafts.batch.decoding == 0
    steps.compare(drafts, 8)
    if family == "qwen3":
        wide = steps.inputs({2: [11]}, decoding=[2])
        tables = torch.nn.functional.pad(wide.batch.page_tables, (0, TABLE))
        wide.batch = replace(wide.batch, page_tables=tables)
        steps.compare(wide, None)
        steps.compare(steps.inputs({2: [4] * (MAX_TOKENS + 1)}), None)
    steps.compare(steps.inputs({0: [12, 13]}), 2)
    assert padded == ({None, 0, 1, 2, 3, 11} if family == "mixtral" else set())
    decoder.bind(steps.cache)
    assert decoder.replay is None, "the graphs hold addresses of other pages"


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int | None]]:
    """(tokens, bucket) of each step that `PromptGraphs` was asked for; the GPU's path anywhere."""
    for own in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(own, "can_use_triton", lambda device: True)
    steps: list[tuple[int, int | None]] = []
    replay = PromptGraphs.replay

    def counted(self: PromptGraphs, inputs: StepInputs) -> torch.Tensor | None:
        stream = replay(self, inputs)
        steps.append((len(inputs.input_ids), None if stream is None else len(stream)))
        return stream

    def counted_whole(self: PromptGraphs, info: Any, *given: Any) -> torch.Tensor:
        stream = run(self, info, *given)
        steps.append((len(info.merge_prompt), len(stream)))
        return stream

    run = PromptGraphs.run
    monkeypatch.setattr(PromptGraphs, "replay", counted)
    monkeypatch.setattr(PromptGraphs, "run", counted_whole)
    return steps


def test_the_tokens_of_an_engine(
    two_layers: Any, served: Make, request_of: Make, replayed: list[tuple[int, int | None]]
) -> None:
    """Prompts in chunks, beside decodes; again after a restart, and on new pages after a sleep."""

    def run(engine: Any) -> dict[int, list[int]]:
        sampling = Sampling(temperature=1.1, seed=7)
        tokens: dict[int, list[int]] = engine.run(
            request_of(0, range(3, 33), 4),
            request_of(1, [9, 8, 5], 5, sampling=sampling),
            request_of(2, range(40, 57), 3),
            stagger=1,
        )
        return tokens

    settings = {"attention": "triton", "device": DEVICE.type, "max_decoding_batch": 3}
    wanted = run(served(two_layers.folder, **settings | {"attention": "torch"}))
    assert run(served(two_layers.folder, **settings, enforce_eager=True)) == wanted
    assert not replayed
    engine = served(two_layers.folder, **settings)
    assert run(engine) == wanted
    assert not engine.sampled, "a head or a sampling was launched one by one"
    prompts = [info for info in engine.steps if len(info.ids) > info.decoding_batch]
    assert any(info.decoding_batch for info in prompts)
    assert [tokens for tokens, _ in replayed] == [len(info.merge_prompt) for info in prompts]
    assert {bucket for _, bucket in replayed} == {4, 8, 24}
    graphs, model = engine.runner._graphs, engine.runner._loaded.gpu_model
    replayed.clear()
    engine.engine.replace_runners(RunnerGroupFailed("lost"))
    assert engine.runner._graphs is graphs
    assert engine.run(request_of(2, range(40, 57), 3))[2] == wanted[2]
    assert replayed == [(17, 24)]
    engine.runner.sleep()
    assert model.replay is None
    engine.executor.restart()
    assert engine.runner._graphs is not graphs and model.replay is not None


def test_steps_with_drafts(
    two_layers: Any, served: Make, request_of: Make, replayed: list[tuple[int, int | None]]
) -> None:
    """They have rows of several tokens, none of which decodes for the attention. Those of the draft
    model, which is the model itself, are replayed too."""
    folder, prompt = str(two_layers.folder), [5, 9, 3, 5, 9]
    drafter = {"model": folder, "num_speculative_tokens": 2, "adaptive": False}
    engine = served(
        folder,
        speculative_config=json.dumps(drafter),
        attention="triton",
        device=DEVICE.type,
        max_decoding_batch=4,
    )
    replayed.clear()
    assert engine.run(request_of(0, prompt, 6))[0] == two_layers.greedy(prompt, 6)
    assert engine.engine.stats().spec_draft_tokens
    assert replayed[:2] == [(5, 8)] * 2, "the prompt, by both models"
    assert {(3, 4), (1, 1)} <= set(replayed), "drafts to be verified, and drafting"
    assert all(bucket is not None for _, bucket in replayed)
