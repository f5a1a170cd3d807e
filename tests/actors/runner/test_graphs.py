"""Decode leases on the device: buckets, how far a row goes, and the tokens of an eager engine.

On a CPU the steps are not recorded and run in Triton's interpreter; all else is the same.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.messages import NewRequest, Sampling, SchedulerInfo
from rayfin.actors.runner import model_runner
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.scheduler import lease
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.sampling import select as sampling_select

pytest.importorskip("triton")
from rayfin.actors.runner.decode_state import bucket_of, bucket_sizes, steps_of
from rayfin.actors.runner.graphs import DecodeGraphs

Make = Callable[..., Any]
ON_GPU = torch.cuda.is_available()


def test_buckets() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    sizes = bucket_sizes(1000)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 512
    assert [bucket_of(rows, sizes) for rows in (1, 3, 33, 512, 513)] == [1, 4, 48, 512, None]


def decode_info(kv_len: list[int], lease: int) -> SchedulerInfo:
    rows = np.arange(len(kv_len), dtype=np.int32)
    return SchedulerInfo(
        epoch=0,
        step=0,
        ids=rows,
        chunk_idx=rows,
        chunk_len=np.ones_like(rows),
        merge_prompt=np.full_like(rows, -1),
        kv_len=np.array(kv_len, np.int32),
        kv_page_len=np.full_like(rows, 3),
        last_pos=np.zeros_like(rows),
        is_decoding=np.ones(len(rows), np.bool_),
        decoding_batch=len(rows),
        prefill_batch=0,
        new_pages=np.arange(3 * len(rows), dtype=np.int32),
        new_pages_len=np.full_like(rows, 3),
        lease=lease,
    )


def test_steps_end_at_the_cap_and_within_the_pages() -> None:
    """As many as `goes_on` lets through when nobody meets a stop token."""
    info = decode_info([4, 4, 4, 11], lease=6)
    info.new_requests = [
        NewRequest(handle, Sampling(), cap=cap) for handle, cap in enumerate((100, 8, 5, 100))
    ]
    slots = RequestSlots(4, 8)
    slots.apply(info)
    steps = steps_of(info, slots, page_size=4)
    assert steps.tolist() == [6, 3, 1, 1]
    for row, taken in enumerate(steps[:3].tolist()):
        for step in range(taken - 1):
            one = decode_info([int(info.kv_len[row]) + step], lease=1)
            one.ids = np.array([row], np.int32)
            assert slots.goes_on(one, np.array([7], np.int32)).all()


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's path, whatever the device."""
    for module in (model_runner, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(lease, "CALL_SECONDS", 1e6)  # long leases, however slow the machine


def test_the_tokens_of_an_eager_engine(
    tiny_model: Make,
    served: Make,
    request_of: Make,
    monkeypatch: pytest.MonkeyPatch,
    on_triton: None,
) -> None:
    """Rows of other lengths, greedy and seeded; one ends within a lease."""
    folder = tiny_model("qwen3").folder
    samplings = [Sampling(), Sampling(temperature=1.2, top_p=0.9, seed=5)]
    calls: list[int] = []
    run = DecodeGraphs.run

    def counted(self: DecodeGraphs, info: SchedulerInfo) -> Any:
        calls.append(info.lease)
        engine._rows = []  # what it records is of steps that Python sees
        return run(self, info)

    monkeypatch.setattr(DecodeGraphs, "run", counted)
    tokens = {}
    for attention in ("torch", "triton"):
        engine = served(
            folder,
            attention=attention,
            max_lease=4,
            max_decoding_batch=2,
            device="cuda" if ON_GPU else "cpu",
        )
        requests = [
            request_of(key, list(range(3, 3 + length)), 3 + 3 * key, sampling=samplings[key])
            for key, length in enumerate((5, 2))
        ]
        tokens[attention] = engine.run(*requests)
        assert bool(calls) == (attention == "triton")
    assert tokens["triton"] == tokens["torch"]
    assert max(calls) == 4
