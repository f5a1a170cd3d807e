"""Moves made together do what they would do one after another, on memory and to a model."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayfin.actors.config import resolve
from rayfin.actors.messages import COPY, SWAP_IN, SWAP_OUT, NewRequest, Sampling
from rayfin.actors.runner import page_moves
from rayfin.actors.runner import page_moves as copy_stream
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.page_moves import PageMover, contiguous, runs
from rayfin.cache.kv_tensors import KVLayout, KVTensors

Make = Callable[..., Any]
LAYOUTS = [KVLayout(2, 3, 3), KVLayout(1, 4, 5)]
PAGES, HOST_PAGES = 6, 4


def _tensors(pages: int, first: int, device: str = "cpu", *, pinned: bool = False) -> KVTensors:
    """Every page of every tensor holds a number of its own."""
    cache = KVTensors(LAYOUTS, pages, 2, torch.float32, torch.device(device), pinned=pinned)
    for number, tensor in enumerate([*cache.keys, *cache.values]):
        start = first + 1000 * number
        tensor += torch.arange(start, start + pages, device=device).view(-1, 1, 1, 1)
    return cache


def _one_by_one(moves: list[tuple[int, int, int]]) -> tuple[list[int], list[int]]:
    device, host = list(range(PAGES)), list(range(100, 100 + HOST_PAGES))
    for kind, source, target in moves:
        if kind == COPY:
            device[target] = device[source]
        elif kind == SWAP_OUT:
            host[target] = device[source]
        else:
            device[target] = host[source]
    return device, host


PAGE, HOST_PAGE = st.integers(0, PAGES - 1), st.integers(0, HOST_PAGES - 1)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just(COPY), PAGE, PAGE),
        st.tuples(st.just(SWAP_OUT), PAGE, HOST_PAGE),
        st.tuples(st.just(SWAP_IN), HOST_PAGE, PAGE),
    ),
    max_size=12,
)


@settings(max_examples=150)
@given(moves=MOVES)
def test_moves_are_as_if_one_after_another(moves: list[tuple[int, int, int]]) -> None:
    device, host = _tensors(PAGES, 0), _tensors(HOST_PAGES, 100)
    PageMover(device, host).run(np.array(moves, np.int32).reshape(-1, 3))
    for cache, expected in zip((device, host), _one_by_one(moves), strict=True):
        for number, tensor in enumerate([*cache.keys, *cache.values]):
            content = tensor.flatten(1)
            assert (content == content[:, :1]).all()
            assert content[:, 0].tolist() == [1000 * number + page for page in expected]


@pytest.mark.gpu
def test_moves_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what it computes; many, so that tensors under way are waited for."""
    monkeypatch.setattr(copy_stream, "MOST_UNDER_WAY", 500)
    rng, moves = random.Random(0), []
    for _ in range(3000):
        kind = rng.choice((COPY, SWAP_OUT, SWAP_IN))
        source = rng.randrange(HOST_PAGES if kind == SWAP_IN else PAGES)
        moves.append((kind, source, rng.randrange(HOST_PAGES if kind == SWAP_OUT else PAGES)))
    device, host = _tensors(PAGES, 0, "cuda"), _tensors(HOST_PAGES, 100, pinned=True)
    PageMover(device, host).run(np.array(moves, np.int32))
    torch.cuda.synchronize()
    for cache, expected in zip((device, host), _one_by_one(moves), strict=True):
        for number, tensor in enumerate([*cache.keys, *cache.values]):
            assert tensor.flatten(1)[:, 0].tolist() == [1000 * number + page for page in expected]


def _shapes(*moves: tuple[int, int, int]) -> list[tuple[int, int]]:
    return [(kind, len(sources)) for kind, sources, _ in runs(np.array(moves, np.int32))]


def test_moves_of_one_kind_are_one_run() -> None:
    assert _shapes((SWAP_OUT, 0, 3), (SWAP_OUT, 1, 2), (SWAP_OUT, 3, 1)) == [(SWAP_OUT, 3)]
    assert _shapes((COPY, 0, 1), (COPY, 2, 0)) == [(COPY, 2)]  # read before it is written
    # A page that went out and came back, and the same host page for the next one.
    assert _shapes((SWAP_OUT, 3, 0), (SWAP_IN, 0, 3), (SWAP_OUT, 4, 0)) == [(1, 1), (2, 1), (1, 1)]


def test_run_ends_where_a_move_depends_on_it() -> None:
    assert _shapes((COPY, 0, 1), (COPY, 1, 2)) == [(COPY, 1), (COPY, 1)]
    assert _shapes((COPY, 0, 1), (COPY, 1, 2), (COPY, 3, 1)) == [(COPY, 1), (COPY, 2)]
    assert _shapes((SWAP_OUT, 0, 1), (SWAP_OUT, 2, 1)) == [(SWAP_OUT, 1), (SWAP_OUT, 1)]
    assert _shapes((SWAP_OUT, 0, 1), (SWAP_OUT, 1, 0)) == [(SWAP_OUT, 2)]  # another memory
    assert _shapes() == []


def test_runs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_moves, "MOST_AT_ONCE", 3)
    assert _shapes(*((SWAP_IN, page, page) for page in range(7))) == [(2, 3), (2, 3), (2, 1)]


def test_contiguous() -> None:
    pages = np.array([4, 5, 6, 2, 3, 9, 8], np.int32)
    assert contiguous(pages) == [(0, 4, 7), (3, 2, 4), (5, 9, 10), (6, 8, 9)]


def test_fp8_pages_are_moved_too() -> None:
    """Copied, and out to host memory and back."""
    device, host = (
        KVTensors(LAYOUTS, pages, 2, torch.float8_e4m3fn, torch.device("cpu"))
        for pages in (PAGES, HOST_PAGES)
    )
    for tensor in (*device.keys, *device.values):
        tensor.copy_(torch.arange(PAGES).view(-1, 1, 1, 1).expand(tensor.shape))
    moves = [(COPY, 2, 0), (SWAP_OUT, 5, 1), (COPY, 1, 5), (SWAP_IN, 1, 3)]
    PageMover(device, host).run(np.array(moves, np.int32))
    for tensor in (*device.keys, *device.values):
        content = tensor.float().flatten(1)
        assert (content == torch.tensor([2.0, 1, 2, 5, 4, 1]).view(-1, 1)).all()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_moved_pages_serve_as_before(
    family: str, tiny_model: Make, engine_args: Make, step_of: Make, row: Make
) -> None:
    """Out to host memory, overwritten, in elsewhere, copied: the next token does not notice."""
    tiny = tiny_model(family)
    prompt = list(range(3, 13))  # two pages and a half
    truth = tiny.greedy(prompt, 5)
    args = engine_args(tiny.folder, preemption="swap")
    runner = ModelRunner(args)
    config = replace(resolve(args, *runner.profile()), num_pages=16, num_host_pages=4)
    runner.start(config, epoch=0)
    tokens: list[int] = []

    def run(info: Any, *moves: tuple[int, int, int]) -> int:
        info.step = run.step
        run.step += 1
        info.moves = np.array(moves, np.int32).reshape(-1, 3)
        return int(runner.execute(info).tokens[0, 0])

    run.step = 0
    first = row(0, prompt, held=3, new_pages=[0, 1, 2])
    tokens.append(run(step_of(first, new=[NewRequest(0, Sampling(), 40)])))
    # Another request writes over all three pages in the step that moves them out.
    other = row(1, [9] * 12, held=3, new_pages=[2, 1, 0])
    out = [(SWAP_OUT, page, 3 - page) for page in range(3)]
    run(step_of(other, finished=[0], new=[NewRequest(1, Sampling(), 40)]), *out)
    again = row(0, tokens, kv_len=10, held=3, new_pages=[7, 4, 5])
    back = [(SWAP_IN, 3 - number, page) for number, page in enumerate((7, 4, 5))]
    tokens.append(run(step_of(again, new=[NewRequest(0, Sampling(), 40)]), *back))
    # A copy of the last page under a handle of its own, while the first goes on.
    both = [
        row(0, tokens[1:], kv_len=11, held=3, decoding=True),
        row(2, tokens[1:], kv_len=11, held=3, new_pages=[7, 4, 6]),
    ]
    tokens.append(run(step_of(*both, new=[NewRequest(2, Sampling(), 40)]), (COPY, 5, 6)))
    copy = row(2, [-1], kv_len=12, held=4, new_pages=[8], decoding=True)
    tokens.append(run(step_of(copy)))
    assert tokens == truth[:4]
