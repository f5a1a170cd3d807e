"""Decode leases on the device: buckets, how far a row goes, and the tokens of an eager engine.

On a CPU the steps are not recorded and run in Triton's interpreter; all else is the same.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.errors import RunnerGroupFailed
from rayfin.actors.messages import NewRequest, Sampling, SchedulerInfo
from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.scheduler.policy import multi_step
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.sampling import select as sampling_select

pytest.importorskip("triton")
from rayfin.actors.runner.gpu.decode_state import bucket_of, bucket_sizes, max_steps_per_row
from rayfin.actors.runner.gpu.graphs import DecodeGraphs
from rayfin.kernels.attention.triton_backend import Sizes, TileShape, TritonAttention

Make = Callable[..., Any]
DECODE_SHAPE = TritonAttention.decode_shape
ON_GPU = torch.cuda.is_available()


def test_buckets() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(6) == [1, 2, 4, 6]
    sizes = bucket_sizes(1000)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 512
    assert [bucket_of(rows, sizes) for rows in (1, 3, 33, 512, 513)] == [1, 4, 48, 512, None]


def decode_info(kv_len: list[int], num_steps: int) -> SchedulerInfo:
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
        num_steps=num_steps,
    )


def test_steps_end_at_the_cap_and_within_the_pages() -> None:
    """As many as `still_decoding` lets through when no row meets a stop token."""
    info = decode_info([4, 4, 4, 11], num_steps=6)
    info.new_requests = [
        NewRequest(handle, Sampling(), cap=cap) for handle, cap in enumerate((100, 8, 5, 100))
    ]
    slots = RequestSlots(4, 8)
    slots.apply(info)
    steps = max_steps_per_row(info, slots, page_size=4)
    assert steps.tolist() == [6, 3, 1, 1]
    for row, taken in enumerate(steps[:3].tolist()):
        for step in range(taken - 1):
            one = decode_info([int(info.kv_len[row]) + step], num_steps=1)
            one.ids = np.array([row], np.int32)
            assert slots.still_decoding(one, np.array([7], np.int32)).all()


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's path, whatever the device."""
    for module in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)  # long leases, however slow the machine


@pytest.fixture
def run_both(
    two_layers: Any,
    served: Make,
    request_of: Make,
    monkeypatch: pytest.MonkeyPatch,
    on_triton: None,
) -> Callable[..., tuple[Any, Any, list[int]]]:
    """(engine step by step with torch, engine with leases on Triton, these leases' lengths), after
    requests of the samplings given, with the same tokens from both; ``eager`` of one more on Triton
    that records nothing.
    """

    def run(*samplings: Sampling, eager: bool = False) -> tuple[Any, Any, list[int]]:
        calls: list[int] = []
        begin_lease = DecodeGraphs.begin

        def counted(self: DecodeGraphs, info: SchedulerInfo, rules: Any) -> Any:
            calls.append(info.num_steps)
            engine._rows = []  # what it records is of steps that Python sees
            return begin_lease(self, info, rules)

        monkeypatch.setattr(DecodeGraphs, "begin", counted)
        engines, tokens = [], []
        for attention, enforce_eager in [("torch", False), ("triton", True), ("triton", False)]:
            if enforce_eager and not eager:
                continue
            engine = served(
                two_layers.folder,
                attention=attention,
                enforce_eager=enforce_eager,
                max_lease=4,
                max_decoding_batch=2,
                device="cuda" if ON_GPU else "cpu",
            )
            requests = [
                request_of(key, list(range(3, 3 + length)), 3 + 3 * key, sampling=samplings[key])
                for key, length in enumerate((5, 2))
            ]
            tokens.append(engine.run(*requests))
            engines.append(engine)
            assert (attention == "triton" and not enforce_eager) or not calls
        for engine, given in zip(engines, tokens, strict=True):
            assert given == tokens[0] and engine.errors == engines[0].errors
        return engines[0], engines[-1], calls

    return run


def test_the_tokens_of_an_eager_engine(run_both: Make) -> None:
    """Rows of other lengths, greedy and seeded; one ends within a lease. Asleep it keeps none."""
    samplings = Sampling(), Sampling(temperature=1.2, top_p=0.9, seed=5)
    _, leased, calls = run_both(*samplings, eager=True)
    assert max(calls) == 4
    runner, graphs = leased.runner, leased.runner._graphs
    assert graphs is not None
    sizes = graphs._sizes  # kernels of extras compile now, those of few rows by a size of their own
    assert {size for size, extras, _ in graphs._replays if extras} == {sizes[0], sizes[-1]}
    assert {size for size, extras, _ in graphs._replays if not extras} == set(sizes)
    keys, tables = leased.runner._bound[1].keys, graphs._state._on_device.tables
    leased.executor.restart()  # as an adoption or a lost step does: pages and graphs stay
    assert runner._graphs is graphs and runner._bound[1].keys is keys
    assert graphs._slots is runner._slots is graphs._state._on_device._slots
    assert not graphs._state._on_device._entries.any()
    assert graphs._state._on_device.tables is tables
    runner.sleep()
    assert runner._graphs is None
    leased.executor.restart()
    assert runner._graphs is not graphs and runner._bound[1].keys is not keys


def test_a_restarted_engine_says_the_same(
    two_layers: Any, served: Make, request_of: Make, on_triton: None
) -> None:
    """Its slots are new, though the graphs are not: nothing of the requests before is left."""
    engine = served(
        two_layers.folder,
        attention="triton",
        max_lease=2,
        max_decoding_batch=1,
        device="cuda" if ON_GPU else "cpu",
    )
    engine.runner._model.forward = engine._forward
    engine.runner._forward.run = engine._advance
    graphs = engine.runner._graphs
    first = engine.run(request_of(0, [5, 6, 7], 3))
    engine.engine.replace_runners(RunnerGroupFailed("lost"))
    other = engine.run(request_of(1, [9, 4], 2, sampling=Sampling(temperature=0.9, seed=3)))
    again = engine.run(request_of(0, [5, 6, 7], 3))
    assert again == first and len(other[1]) == 2
    assert engine.runner._graphs is graphs


def split(attention: TritonAttention, sizes: Sizes) -> TileShape:
    return replace(DECODE_SHAPE(attention, sizes), keys=16, programs=8)


def test_a_call_that_fails_leaves_no_counter(
    two_layers: Any,
    served: Make,
    request_of: Make,
    on_triton: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the load and the replay: its rows run step by step, and the next calls are right.

    Rows are long enough to be split, so that programs count who has arrived.
    """
    settings = {"num_pages": 160, "max_batch_tokens": 256, "max_decoding_batch": 1, "max_lease": 2}
    monkeypatch.setattr(ModelRunner, "_can_queue", lambda *_: False)  # a runner then starts anew
    monkeypatch.setattr("rayfin.actors.runner.gpu.decode_state.MIN_PART", 8)
    if not ON_GPU:
        monkeypatch.setattr(TritonAttention, "decode_shape", split)
    prompt, tokens = [3 + i * 7 % 50 for i in range(40)], {}
    for attention in ("torch", "triton"):
        engine = served(
            two_layers.folder, attention=attention, device="cuda" if ON_GPU else "cpu", **settings
        )
        if attention == "triton":
            engine.runner._model.forward = engine._forward
            engine.runner._forward.run = engine._advance
            state, failed = engine.runner._graphs._state, []
            load = state.load

            def broken(*given: Any, load: Any = load, failed: Any = failed) -> None:
                load(*given)
                if len(failed) < 2:
                    failed.append(given)
                    raise RuntimeError("planted")

            monkeypatch.setattr(state, "load", broken)
        tokens[attention] = engine.run(request_of(0, prompt, 7))
    assert len(failed) == 2 and tokens["triton"] == tokens["torch"]
    launches = [each.launch for each in state.launches._graph_launches.values()]
    assert launches and not any(launch.arrived.any() for launch in launches)
    assert ON_GPU or any(launch.part_lse.any() for launch in launches), "no row was split"


RICH = Sampling(
    temperature=0.7,
    seed=3,
    presence_penalty=0.4,
    frequency_penalty=1.5,
    repetition_penalty=1.4,
    logit_bias=((3, 5.0), (7, -100.0), (9, 2.0)),
    allowed=tuple(range(2, 60)),
    bad_words=((4,),),
    banned=(8, 3),
    banned_until=6,
    logprobs=3,
)


def test_rules_and_log_probabilities_stay_on_the_device(run_both: Make) -> None:
    """Counted on the device within a lease, and on the host for the next one."""
    samplings = (Sampling(repetition_penalty=1.8, frequency_penalty=0.5, logprobs=0), RICH)
    eager, leased, calls = run_both(*samplings)
    assert sum(calls) >= 5 and max(calls) == 4  # all of the second row's but its first
    for key, sampling in enumerate(samplings):
        assert len(leased.logprobs[key]) == len(eager.logprobs[key]) > 0
        for wanted, given in zip(eager.logprobs[key], leased.logprobs[key], strict=True):
            count = sampling.logprobs
            assert abs(given[0] - wanted[0]) < 1e-4 and given[1] == wanted[1]
            assert given[2][:count] == wanted[2][:count]
            assert np.allclose(given[3][:count], wanted[3][:count], atol=1e-4)
