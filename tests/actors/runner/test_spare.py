"""What a spare runner does ahead: imports at low priority, and loads what only has to be mapped."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayfin.actors.config import BatchLimits, EngineArgs, EngineConfig, ModelFacts, resolve
from rayfin.actors.processes.environment import BEHIND_RUNNERS
from rayfin.actors.runner import model_runner, spare
from rayfin.actors.runner.actor import ModelRunnerActor
from rayfin.actors.runner.weights import refill
from rayfin.actors.settings.spare_runners import LEFT_BYTES, SPARE_BYTES
from rayfin.actors.weights.sources import folder_version
from rayfin.kernels.cpu.kernels import try_kernels

Make = Callable[..., Any]
FOR_EVER = 1e9  # seconds
LIMITS = BatchLimits(max_batch_tokens=64, max_decoding_batch=8, max_prefill_batch=4)
FACTS = ModelFacts(
    architecture="Toy",
    vocab_size=100,
    max_position=128,
    page_bytes=1 << 20,
    available_bytes=100 << 20,
)
PAGES_BYTES = 64 << 20  # eight requests of 128 tokens, 16 in a page


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, ...]]:
    """Three that no other test imports: the second raises, the third has a thread's priority."""
    noted = "import os, threading\nname = threading.current_thread().name\n"
    sources = {
        "spare_first": "",
        "spare_broken": "raise OSError('no such library')",
        "spare_noted": noted + "niceness = os.getpriority(os.PRIO_PROCESS, 0)\n",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tuple(sources)
    for name in sources:
        sys.modules.pop(name, None)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority")
def test_imports_are_behind_all_else_and_leave_the_process_its_priority(
    modules: tuple[str, ...],
) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    spare.import_modules(["sys", *modules, "spare_missing"])
    noted = sys.modules["spare_noted"]
    assert noted.niceness == min(before + BEHIND_RUNNERS, 19)
    assert noted.name != threading.current_thread().name
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert "spare_first" in sys.modules
    assert "spare_broken" not in sys.modules


def config() -> EngineConfig:
    made = resolve(EngineArgs(), FACTS, LIMITS)
    assert made.num_pages * made.page_bytes == PAGES_BYTES
    return made


@pytest.mark.parametrize(
    ("free", "grown", "count"),
    [
        (PAGES_BYTES, 0, 1),
        (PAGES_BYTES - 1, 0, 0),
        (0, PAGES_BYTES, 1),  # the pages are in memory already, so free memory is without them
        (0, 10 * PAGES_BYTES, 1),
        (-1, 10 * PAGES_BYTES, 0),
    ],
)
def test_pages_that_will_be_used_are_not_free(
    free: int, grown: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare, "free_bytes", lambda: LEFT_BYTES + SPARE_BYTES + free)
    plan = spare.plan_spares(EngineArgs(), config(), grown, served=True)
    assert plan.count == count
    assert bool(plan.modules) == bool(count)


def test_a_spare_imports_what_its_runner_has() -> None:
    plan = spare.plan_spares(EngineArgs(spare_runners=3), config(), 0, served=False)
    assert plan.count == 3
    assert {"torch", "transformers", spare.__name__} <= set(plan.modules)


def test_a_gpu_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = spare.plan_spares(EngineArgs(spare_runners=1, device="cuda"), config(), 0, served=True)
    assert plan.count == 0


# The actor, without Ray.


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[EngineArgs]:
    """The settings of each model that is loaded from now on."""
    loaded: list[EngineArgs] = []
    real: Any = vars(model_runner)["load"]

    def load(args: EngineArgs, *others: Any) -> Any:
        loaded.append(args)
        return real(args, *others)

    monkeypatch.setattr(model_runner, "load", load)
    return loaded


def actor() -> Any:
    kind: Any = ModelRunnerActor
    return kind.__ray_metadata__.modified_class(FOR_EVER)


def settings(folder: Path, **more: Any) -> EngineArgs:
    return EngineArgs(model=str(folder), device="cpu", kv_cache_memory=1 << 24, threads=1, **more)


def test_weights_that_are_not_packed_are_loaded_when_it_takes_over(
    tiny_model: Make, loads: list[EngineArgs], tmp_path: Path
) -> None:
    own, folder = actor(), tiny_model("llama").folder
    for args in (settings(folder), settings(folder, weights_cache=str(tmp_path / "empty"))):
        own.warm(args, ["json"])
        assert loads == []
    assert own.load(settings(folder), measure=False) is None
    assert len(loads) == 1
    assert own.load(settings(folder)) is not None  # it has loaded, and now measures
    assert len(loads) == 1


@pytest.mark.skipif(try_kernels(1) is None, reason="the CPU kernels are not built")
def test_packed_weights_are_mapped_ahead(
    tiny_model: Make, loads: list[EngineArgs], tmp_path: Path
) -> None:
    args = settings(tiny_model("llama").folder, weights_cache=str(tmp_path / "cache"))
    facts, limits = actor().load(args)  # packs them
    own = actor()
    own.warm(args, [])
    assert len(loads) == 2
    assert own.load(args, measure=False) is None
    own.start(resolve(args, facts, limits), 3)
    assert len(loads) == 2
    assert own._runner.next_step == (3, 0)


def test_a_runner_without_pages_plans_none() -> None:
    assert actor().plan_spares(True).count == 0


@pytest.mark.skipif(try_kernels(1) is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("in_place", [True, False])
def test_a_spare_takes_over_with_new_weights(
    in_place: bool,
    tiny_model: Make,
    loads: list[EngineArgs],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a model that only new runners load: it has mapped the ones before."""
    folder = tiny_model("llama").folder
    args = settings(folder, weights_cache=str(tmp_path / "cache"))
    actor().load(args)
    own, version = actor(), replace(folder_version(str(folder), "step-1"), serial=1)
    own.warm(args, [])
    if not in_place:
        monkeypatch.setattr(refill, "can_refill", lambda loaded, args: False)
    assert own.load(args, measure=False, version=version) is None
    assert own._version == version and len(loads) == 3
    assert own.load(args, measure=False, version=version) is None and len(loads) == 3
