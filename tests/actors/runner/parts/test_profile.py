"""Profiles of steps: orders, traces on one clock, and what stands in their way."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rayfin import AsyncEngineArgs, AsyncLLM, SamplingParams
from rayfin.actors.errors import EngineBusy, InvalidRequest, NotFound
from rayfin.actors.profile import ProfileOrder
from rayfin.actors.runner.parts.profile import ProfilePart, StepProfiler
from rayfin.actors.scheduler.profiled_executor import profiled

SETTINGS: dict[str, Any] = {"threads": 1, "kv_cache_memory": 16 * 2**20}


class Info:
    """What a profiler reads of a step."""

    def __init__(self, step: int) -> None:
        self.epoch, self.step = 1, step


class Inner:
    """An executor whose steps are computed as they are sent, under a profiler."""

    epoch = 1

    def __init__(self, part: ProfilePart) -> None:
        self.part = part

    def submit(self, info: Any) -> Any:
        run(self.part.observers[0], info)
        return type("Pending", (), {"result": lambda self: info})()

    def prepare(self, needs: Any) -> None:
        self.part.prepare(needs)


def run(profiler: Any, info: Any) -> None:
    profiler.before(info)
    torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.after(info, None)


def traces(folder: Path) -> list[dict[str, Any]]:
    assert not list(folder.glob("*.part"))
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def steps(trace: dict[str, Any], of_scheduler: bool = False) -> list[str]:
    found = [own for own in trace["traceEvents"] if own.get("name", "").startswith("step ")]
    return [own["name"] for own in found if (own.get("pid") == "scheduler") == of_scheduler]


def test_both_processes_are_in_one_trace_on_one_clock(tmp_path: Path) -> None:
    executor: Any = profiled(Inner(ProfilePart(str(tmp_path))), str(tmp_path))  # type: ignore[arg-type]
    begin = time.time_ns()
    executor.submit(Info(0)).result()
    executor.prepare(ProfileOrder(prefix="own-", delay=1, steps=2).needs)
    for step in range(1, 6):
        executor.submit(Info(step)).result()
    executor.prepare(ProfileOrder(stop=True).needs)
    executor.submit(Info(6)).result()
    (trace,) = traces(tmp_path)
    assert steps(trace) == ["step 1.2", "step 1.3"]
    assert steps(trace, of_scheduler=True) == ["step 1.1", "step 1.2", "step 1.3"]
    assert any(own["name"] == "aten::mm" for own in trace["traceEvents"] if "name" in own)
    at = {
        (own["name"], own.get("pid") == "scheduler"): (own["ts"], own["ts"] + own["dur"])
        for own in trace["traceEvents"]
        if own.get("name", "").startswith("step ")
    }
    sent, answered = at["step 1.2", True]
    assert sent <= at["step 1.2", False][0] and at["step 1.2", False][1] <= answered
    assert begin < trace["baseTimeNanoseconds"] + sent * 1000 < time.time_ns()
    assert next(tmp_path.iterdir()).name.startswith("own-")
    assert executor.epoch == 1 and profiled(executor, None) is executor


def test_orders_at_the_wrong_time_are_conflicts(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path)
    stop = ProfileOrder(stop=True)
    with pytest.raises(EngineBusy, match="no profile is being taken"):
        profiler.stop(stop)
    profiler.start(ProfileOrder())
    with pytest.raises(EngineBusy, match="a profile is being taken"):
        profiler.start(ProfileOrder())
    assert profiler.in_turn
    profiler.stop(stop)  # before a step has come
    (trace,) = traces(tmp_path)
    assert trace["traceEvents"] == [] and not profiler.in_turn


def test_a_step_that_fails_amid_ends_with_the_next(tmp_path: Path) -> None:
    profiler = StepProfiler(tmp_path)
    profiler.start(ProfileOrder())
    profiler.before(Info(0))  # type: ignore[arg-type]
    run(profiler, Info(1))
    profiler.stop(ProfileOrder(stop=True))
    assert steps(traces(tmp_path)[0]) == ["step 1.0", "step 1.1"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = StepProfiler(tmp_path / "file")
    profiler.start(ProfileOrder())
    with pytest.raises(InvalidRequest, match="the profile cannot be written"):
        profiler.stop(ProfileOrder(stop=True))
    assert not profiler.in_turn


@pytest.mark.parametrize("given", [True, False])
def test_of_an_engine(given: bool, tmp_path: Path) -> None:
    """Tokens are the same; without a folder there are no profiles."""
    args = AsyncEngineArgs("demo", **SETTINGS, profile_dir=str(tmp_path) if given else None)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def ids(llm: AsyncLLM) -> list[int]:
        outputs = [output async for output in llm.generate("What is 3 + 4?", params)]
        return list(outputs[-1].outputs[0].token_ids)

    async def work() -> None:
        async with AsyncLLM.from_engine_args(args) as llm:
            plain = await ids(llm)
            if not given:
                with pytest.raises(NotFound, match="--profile-dir"):
                    await llm.start_profile()
                return
            await llm.start_profile("mine")
            assert np.array_equal(await ids(llm), plain)
            await llm.stop_profile()
            with pytest.raises(EngineBusy):
                await llm.stop_profile()
            (trace,) = traces(tmp_path)
            assert len(steps(trace)) >= 2

    asyncio.run(work())
