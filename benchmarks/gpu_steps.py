"""Whole decode steps: the device's time of each batch size's graph, and its kernels by name."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_bench import Bench
from gpu_engine import release, running, shape_of
from gpu_floors import Floors
from gpu_paths import Paths, runner_of

from rayfin import LLM, SamplingParams
from rayfin.actors.messages import NewRequest, Sampling, SchedulerInfo
from rayfin.actors.runner.batch import ADAPTERS
from rayfin.actors.runner.request_slots import RequestSlots

CONTEXT = 1024
REPLAYS = 40  # of one load: no more steps than the pages hold
NAMED = (1, 64, 256)
SHOWN = 12
CHECKED_BYTES = 4 << 30
"""Pages of an engine that is checked and not timed: tests may run on the device meanwhile."""

SETTINGS = Sampling(temperature=0.6, seed=1)


def steps(bench: Bench) -> None:
    """Replays each batch size's graph at one context; on a GPU only."""
    _steps(bench, "0.6b")


def steps_8b(bench: Bench) -> None:
    """The same with the 8B shape."""
    _steps(bench, "8b")


def steps_int4(bench: Bench) -> None:
    """The same with the 8B shape's linear layers in 4 bits, beside floors of 16."""
    _steps(bench, "8b", "int4")


def _steps(bench: Bench, shape: str, quantization: str | None = None) -> None:
    if not bench.on_gpu:
        print("\n(no graphs without a GPU)")
        return
    floors = Floors.of(shape_of(bench, shape)[1], bench.bandwidth, bench.flops)
    section = "steps" if shape == "0.6b" else f"steps_{quantization or shape}"
    name = f"{shape.upper()} shape" + (f", {quantization}" if quantization else "")
    with running(bench, shape, quantization=quantization) as llm:
        runner = runner_of(llm)
        graphs = runner._graphs
        assert graphs is not None and runner._loaded.gpu_model is not None
        columns = ("rows", "ms", "floor, ms", "share of the floor")
        table = bench.table(section, f"A decode step's graph, {name}, context {CONTEXT}", columns)
        for rows in graphs._sizes:
            replay = load(graphs, rows, runner)
            took = bench.seconds(replay)
            floor = floors.decode([CONTEXT] * rows)
            table.add(rows, f"{took * 1e3:.3f}", f"{floor * 1e3:.3f}", f"{floor / took:.2f}")
        columns = ("rows", "kernel", "launches", "us")
        table = bench.table(section, f"Kernels of a step by name, {name}", columns)
        for rows in NAMED:
            if rows not in graphs._sizes:
                continue
            replay = load(graphs, rows, runner)
            named = bench.kernels(replay)
            assert any("attend_tiles" in name for name in named), "not the graph of our kernels"
            kernels = ("coded_columns", "widen_codes")
            assert not quantization or any(each in name for each in kernels for name in named)
            for name, (launches, took) in list(named.items())[:SHOWN]:
                table.add(rows, name.split("(")[0][:60], launches, f"{took:.1f}")
        graphs.use(runner._slots)
    del llm, runner, graphs
    release(bench)


def features(bench: Bench) -> None:
    """Decode steps with adapters, and of transformers' own modules, beside the plain decoder's."""
    if not bench.on_gpu:
        print("\n(no graphs without a GPU)")
        return
    from rayfin.actors.runner.gpu import decoder as gpu_decoder  # Triton is not everywhere

    columns = ("model", "rows", "ms", "times the plain one")
    table = bench.table("features", f"Decode steps as graphs, 0.6B shape, {CONTEXT}", columns)
    plain: dict[int, float] = {}
    adapters = {"enable_lora": True, "max_loras": 8, "max_lora_rank": 16}
    for name, options, named, merged in (
        ("plain", {}, (), True),
        ("adapters served, none used", adapters, (), True),
        ("8 adapters of rank 16", adapters, (ADAPTERS,), True),
        ("transformers' modules", {}, (), False),
    ):
        unrecognised = mock.patch.object(gpu_decoder, "build_gpu_decoder", lambda *_, **__: None)
        with nullcontext() if merged else unrecognised, running(bench, **options) as llm:
            runner = runner_of(llm)
            graphs = runner._graphs
            assert graphs is not None, f"{name} has no graphs"
            for rows in (1, 8, 64, 256):
                replay = load(graphs, rows, runner, named)
                numbers = {each: np.arange(rows, dtype=np.int64) % 8 for each in named}
                graphs._state.load_numbers(numbers, rows)
                took = bench.seconds(replay)
                plain.setdefault(rows, took)
                table.add(name, rows, f"{took * 1e3:.3f}", f"{took / plain[rows]:.2f}")
            graphs.use(runner._slots)
        del llm, runner, graphs
        release(bench)


def load(graphs: Any, rows: int, runner: Any, named: tuple[str, ...] = ()) -> Callable[[], None]:
    """Loads rows of one context, each with pages of its own; returns their step's replay.

    Args:
        named: the row inputs that the step reads.
    """
    pages = CONTEXT // runner._args.page_size
    owned = np.arange(rows * pages, dtype=np.int32)
    assert len(owned) <= runner._bound[0].num_pages, "rows would share pages, in the L2 cache"
    ids = np.arange(rows, dtype=np.int32)
    ones = np.ones(rows, np.int32)
    info = SchedulerInfo(
        epoch=0,
        step=0,
        ids=ids,
        chunk_idx=ids,
        chunk_len=ones,
        merge_prompt=ones * 5,
        kv_len=ones * (CONTEXT - REPLAYS),
        kv_page_len=ones * pages,
        last_pos=ones * 0,
        is_decoding=np.ones(rows, np.bool_),
        decoding_batch=rows,
        prefill_batch=0,
        new_pages=owned,
        new_pages_len=ones * pages,
        new_requests=[NewRequest(slot, SETTINGS, cap=2 * CONTEXT) for slot in range(rows)],
    )
    recorded: Callable[[], None] = graphs._replay(
        rows, False, named
    )  # before the load: to record runs the step
    slots = RequestSlots(len(graphs._slots.num_pages), graphs._slots.page_tables.shape[1])
    slots.apply(info)
    graphs.use(slots)
    left = np.full(rows, REPLAYS, np.int32)
    with torch.inference_mode():
        graphs._state.load(info, left, rows, np.zeros(rows, np.bool_))
    return recorded


def check_steps(bench: Bench) -> None:
    """Greedy tokens of one model on three paths: transformers' modules, ours, and as graphs.

    In bf16 a near tie may fall either way, so the first tokens decide.
    """
    prompts = [list(range(3 + row, 35 + row)) for row in range(4 if bench.toy else 32)]
    outputs = 8 if bench.toy else 32
    given: dict[str, list[list[int]]] = {}
    for name, options in (
        ("transformers' modules, torch's attention", {"attention": "torch"}),
        ("Rayfin's kernels", {"enforce_eager": True}),
        ("as graphs", {}),
    ):
        with running(bench, kv_cache_memory=CHECKED_BYTES, **options) as llm:
            paths = Paths(llm)
            given[name] = _greedy(llm, prompts, outputs)
            if bench.on_gpu and "attention" not in options:
                paths.expect(graphs=not options)
        del llm, paths
        release(bench)
    columns = ("path", "same first tokens", "same tokens before the first other one")
    table = bench.table("check", "Check: greedy tokens by path, against Rayfin's kernels", columns)
    ours = given["Rayfin's kernels"]
    for name, tokens in given.items():
        first = float(
            np.mean([ids[0] == wanted[0] for ids, wanted in zip(tokens, ours, strict=True)])
        )
        alike = [_alike(ids, wanted) for ids, wanted in zip(tokens, ours, strict=True)]
        table.add(name, f"{first:.2f}", f"{np.mean(alike):.1f} of {outputs}")
        assert first > 0.8, f"{name}: other tokens, nothing below would mean anything"


def _greedy(llm: LLM, prompts: list[list[int]], outputs: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True, detokenize=False)
    return [each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)]


def _alike(ids: list[int], wanted: list[int]) -> int:
    same = (np.array(ids) == np.array(wanted)).tolist()
    return same.index(False) if False in same else len(same)
