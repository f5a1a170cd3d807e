"""A step's tensors, from handmade steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.messages import NewRequest, Sampling, SchedulerInfo
from rayfin.actors.runner.batch import SampledRows, StepInputs, build_inputs
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.kernels import shapes

Make = Callable[..., Any]
PAGE_SIZE = 4


def _build(info: SchedulerInfo, slots: RequestSlots) -> tuple[StepInputs, SampledRows]:
    slots.apply(info)
    return build_inputs(info, slots, PAGE_SIZE, torch.device("cpu"))


def _prefilled(step_of: Make, row: Make) -> RequestSlots:
    """Handles 0 (5 tokens on pages 7, 2) and 2 (4 tokens on page 5), each sampled once."""
    slots = RequestSlots(4, 6)
    first = step_of(
        row(0, [10, 11, 12, 13, 14], held=2, new_pages=[7, 2]),
        row(2, [20, 21, 22, 23], held=1, new_pages=[5]),
        new=[NewRequest(0, Sampling(), 100), NewRequest(2, Sampling(0.5, 3, 0.9, 0.1, 77), 100)],
    )
    slots.apply(first)
    slots.remember(first, np.array([15, 24], np.int32))
    return slots


def test_prompts(step_of: Make, row: Make) -> None:
    info = step_of(
        row(1, [10, 11, 12, 13, 14], held=2, new_pages=[7, 2]),
        row(3, [20, 21, 22, 23], held=1, new_pages=[5]),
        new=[NewRequest(1, Sampling(), 100), NewRequest(3, Sampling(), 100)],
    )
    inputs, at = _build(info, RequestSlots(4, 6))
    batch = inputs.batch
    assert inputs.input_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 23]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert batch.slots.tolist() == [28, 29, 30, 31, 8, 20, 21, 22, 23]
    assert batch.query_start.tolist() == [0, 5, 9] == list(batch.query_start_cpu)
    assert batch.kv_len.tolist() == [5, 4] == list(batch.kv_len_cpu)
    assert batch.page_tables[0].tolist() == [7, 2] and batch.page_tables[1, 0] == 5
    assert (batch.decoding, batch.page_size) == (0, PAGE_SIZE)
    assert inputs.sampled.tolist() == [4, 8] and at.rows.tolist() == [0, 1]
    assert inputs.input_ids.dtype == batch.slots.dtype == batch.positions.dtype == torch.int64
    assert batch.query_start.dtype == batch.kv_len.dtype == torch.int32
    assert batch.page_tables.dtype == torch.int32


def test_decoding_rows_and_a_chunk(step_of: Make, row: Make) -> None:
    """Placeholders become the sampled tokens; a page is appended at its boundary."""
    slots = _prefilled(step_of, row)
    info = step_of(
        row(2, [-1], kv_len=4, held=2, new_pages=[9], decoding=True),
        row(0, [-1], kv_len=5, held=2, decoding=True),
        row(1, [30, 31, 32], held=2, new_pages=[1, 3], samples=False),
        new=[NewRequest(1, Sampling(), 100)],
    )
    inputs, at = _build(info, slots)
    assert inputs.input_ids.tolist() == [24, 15, 30, 31, 32]
    assert inputs.batch.positions.tolist() == [4, 5, 0, 1, 2]
    assert inputs.batch.slots.tolist() == [36, 9, 4, 5, 6]
    assert inputs.batch.kv_len.tolist() == [5, 6, 3]
    assert inputs.batch.decoding == 2
    assert at.rows.tolist() == [0, 1] and inputs.sampled.tolist() == [0, 1]
    assert at.settings.position.tolist() == [5, 6]
    assert at.settings.seed.tolist() == [77, 0]


def test_chunk_that_goes_on(step_of: Make, row: Make) -> None:
    slots = RequestSlots(4, 6)
    new = [NewRequest(1, Sampling(), 100)]
    _build(step_of(row(1, [30, 31, 32], held=2, new_pages=[6, 3], samples=False), new=new), slots)
    inputs, at = _build(step_of(row(1, [33, 34], kv_len=3, held=2)), slots)
    assert inputs.batch.positions.tolist() == [3, 4]
    assert inputs.batch.slots.tolist() == [27, 12]
    assert inputs.sampled.tolist() == [1]
    assert at.settings.position.tolist() == [5]


def test_nothing_is_sampled(step_of: Make, row: Make) -> None:
    info = step_of(
        row(0, [1, 2], new_pages=[0], samples=False), new=[NewRequest(0, Sampling(), 100)]
    )
    inputs, at = _build(info, RequestSlots(1, 1))
    assert inputs.sampled.shape == (0,) and at.rows.shape == (0,)


def test_sampling_rows(step_of: Make, row: Make) -> None:
    slots = _prefilled(step_of, row)
    info = step_of(
        row(0, [-1], kv_len=5, held=2, decoding=True),
        row(2, [-1], kv_len=4, held=2, new_pages=[9], decoding=True),
    )
    rows = _build(info, slots)[1].settings
    torch.testing.assert_close(rows.temperature, torch.tensor([0.0, 0.5]))
    assert rows.top_k.tolist() == [0, 3]
    torch.testing.assert_close(rows.top_p, torch.tensor([1.0, 0.9]))
    torch.testing.assert_close(rows.min_p, torch.tensor([0.0, 0.1]))
    assert not rows.all_greedy
    assert rows.any_top_k and rows.any_top_p and rows.any_min_p
    greedy = _build(step_of(row(0, [-1], kv_len=6, held=2, decoding=True)), slots)[1].settings
    assert greedy.all_greedy
    assert not (greedy.any_top_k or greedy.any_top_p or greedy.any_min_p)


def test_a_step_travels_in_one_copy(
    step_of: Make, row: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt beside decodes, with settings of rows that were in no step before."""
    copies: list[int] = []

    def send(array: np.ndarray, device: torch.device) -> torch.Tensor:
        copies.append(array.nbytes)
        return torch.from_numpy(array)

    monkeypatch.setattr(shapes, "to_device", send)
    slots = _prefilled(step_of, row)
    info = step_of(
        row(2, [-1], 4, held=2, new_pages=[3], decoding=True),
        row(3, [30, 31, 32], held=1, new_pages=[1]),
        new=[NewRequest(3, Sampling(0.7, 5, 0.8, 0.2, 9), 100)],
    )
    slots.apply(info)
    given, at = build_inputs(info, slots, PAGE_SIZE, torch.device("cuda"))
    assert len(copies) == 1
    slots.settings.set(0, Sampling())  # as if the rows were new
    wanted, wanted_at = build_inputs(info, slots, PAGE_SIZE, torch.device("cpu"))
    assert given.input_ids.tolist() == wanted.input_ids.tolist()
    for name in ("query_start", "kv_len", "page_tables", "slots", "positions"):
        own, other = (getattr(each.batch, name) for each in (given, wanted))
        assert own.dtype == other.dtype and own.tolist() == other.tolist(), name
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position"):
        own, other = (getattr(each.settings, name) for each in (at, wanted_at))
        assert own.dtype == other.dtype and own.tolist() == other.tolist(), name
