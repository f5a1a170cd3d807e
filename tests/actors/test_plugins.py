"""Code of a user's own: one of each kind, as docs/contributing.md has them, and what goes wrong."""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from rayfin import LLM, SamplingParams
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, RequestFailed
from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.plugins import plugins
from rayfin.actors.supervision.supervisor import Supervisor
from rayfin.deployments.edge.middleware import add_own_routes
from rayfin.deployments.offline.engines import InlineEngine
from rayfin.deployments.serve.preflight import check_model, located
from rayfin.deployments.text.parsing.detect import Detected, with_plugins

Make = Callable[..., Any]
PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"
SETTINGS: dict[str, Any] = {"model": "demo", "threads": 1, "kv_cache_memory": 16 * 2**20}
BAD = """
def begin(): ...
class Base:
    def __init__(self, device): ...
    def add(self, slot, request): return True
    def remove(self, slot): ...
    def is_active(self, slot, position): return True
    def accept(self, slot, tokens): ...
    def rollback(self, slot, count): ...
    def device_rules(self, slot): ...
    def apply(self, logits, rows): ...
class Adds(Base):
    def add(self, slot, request):
        assert len(request.history) % 2
        return False
class Accepts(Base):
    def accept(self, slot, tokens): raise ValueError("accept")
class Applies(Base):
    def apply(self, logits, rows): raise ValueError("apply")
class Never:
    def may_admit(self, request): return False
class Raises:
    calls = 0
    def may_admit(self, request):
        Raises.calls += 1
        raise ValueError("gate")
class Watches:
    calls = 0
    def before(self, info):
        Watches.calls += 1
        raise ValueError("before")
    def forwarded(self, info, rows, logits): ...
    def after(self, info, result): ...
    def overwritten(self, pages): ...
    def close(self): ...
class Logs:
    calls = 0
    def log(self, engine, stats):
        Logs.calls += 1
        raise ValueError("log")
def health(app):
    app.get("/health")(begin)
"""


def request(key: int, stop: int, count: int) -> EngineRequest:
    prompt = np.arange(3, stop, dtype=np.int32)
    return EngineRequest(str(key), prompt, Sampling(), StopRules(count, frozenset()), key=key)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Writes a module that can be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)

    yield write
    for name in ("own_page", "own_bad"):
        sys.modules.pop(name, None)


@pytest.fixture
def page(module: Make) -> ModuleType:
    (text,) = re.findall(r"^```python\n(import os\n.*?)^```", PAGE.read_text(), re.M | re.S)
    module("own_page", text)
    import own_page  # type: ignore[import-not-found]

    assert isinstance(own_page, ModuleType)
    return own_page


@pytest.fixture
def bad(module: Make) -> Any:
    module("own_bad", BAD)
    import own_bad  # type: ignore[import-not-found]

    return own_bad


def test_one_of_each_kind(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OWN_SETUP", raising=False)
    params = [SamplingParams(temperature=t, max_tokens=24, seed=1, ignore_eos=True) for t in (0, 1)]
    prompts = ["What is 3 + 4?"] * 2
    rule = ["setup=own_page:begin", "logits_processor=own_page:Even"]
    more = ["observer=own_page:Steps", "gate=own_page:Daytime", "proposer=own_page:Grams"]

    def tokens(named: list[str] | None) -> list[list[int]]:
        with LLM(**SETTINGS, plugin=named) as llm:
            outputs = llm.generate(prompts, params)
            spent.update(llm.stats().plugin_seconds)
            shown = {one.labels["name"] for one in llm.get_metrics() if "name" in one.labels}
            assert shown == llm.stats().plugin_seconds.keys()
            return [own.outputs[0].token_ids for own in outputs]

    spent: dict[str, float] = {}
    plain, even, all_of_them = tokens(None), tokens(rule), tokens(rule + more)
    assert not any(token % 2 for token in even[0]) and even[1] == plain[1]
    assert any(token % 2 for token in plain[0]) and all_of_them == even
    assert os.environ["OWN_SETUP"] == "done" and page.steps and page.seen
    assert spent.keys() == {f"own_page:{name}" for name in ("Even", "Steps", "Daytime", "Grams")}
    assert all(0 < seconds < 60 for seconds in spent.values())
    app = FastAPI()
    add_own_routes(app, [*rule, "route=own_page:hello"])
    assert TestClient(app).get("/hello").json() == {"hello": "there"}
    assert EngineArgs(plugin=rule).identity != EngineArgs().identity
    formats = with_plugins(Detected(), ["format=own_page:calls"])
    assert formats.names == ("own", None)


def test_loggers_get_the_statistics_of_each_pulse(page: Any, bad: Any) -> None:
    """Also beside one that raises, which is dropped."""

    async def answer(_: Any) -> EngineStats:
        return EngineStats(running=3)

    async def watch() -> None:
        for _ in range(4):
            assert await own._pulse() is None

    named = ["stat_logger=own_bad:Logs", "stat_logger=own_page:Log"]
    own: Any = Supervisor(EngineArgs(**SETTINGS, device="cpu", plugin=named), "app/engine/0")
    own._scheduler = SimpleNamespace(pulse=SimpleNamespace(remote=answer))
    asyncio.run(watch())
    assert page.logged == [("app/engine/0", 3)] * 4
    assert bad.Logs.calls == 3


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["own_bad:begin"], "must be KIND=module:name with a KIND of setup, "),
        (["gate="], "KIND=module:name"),
        (["gate=own_bad:Never"] * 2, "names one twice"),
        (["proposer=a:b", "proposer=c:d"], "two proposers"),
        (["gate=own_none:Never"], "No module named 'own_none'"),
        (["gate=own_bad:None_"], "has no attribute 'None_'"),
        (["gate=no_entry_point"], "gate=no_entry_point cannot be loaded"),
        (["gate=own_bad:begin"], r"a class \(\) with may_admit.*; it lacks may_admit"),
        (["observer=own_bad:Never"], "it lacks before, forwarded, after"),
        (["setup=own_bad:BAD_"], "cannot be loaded"),
        (["stat_logger=own_bad:Never"], r"a class \(\) with log.*; it lacks log"),
        (["format=own_bad:begin"], "must return a ToolFormat or a ReasoningFormat, got None"),
    ],
)
def test_what_is_refused_before_a_start(named: list[str], said: str, bad: Any) -> None:
    with pytest.raises(InvalidConfig, match=said) as refused:
        check_model(EngineArgs(**SETTINGS, plugin=named))
    assert refused.value.param == "plugin"


def test_a_route_may_not_be_there_already(bad: Any) -> None:
    app = FastAPI()
    app.get("/health")(bad.begin)
    with pytest.raises(InvalidConfig, match="there is a route /health already"):
        add_own_routes(app, ["route=own_bad:health"])


@pytest.mark.parametrize("name", ["Adds", "Accepts", "Applies"])
def test_a_processor_that_raises_fails_its_rows(name: str, bad: Any) -> None:
    args = EngineArgs(**SETTINGS, plugin=[f"logits_processor=own_bad:{name}"])
    engine = InlineEngine(located(args))
    errors, count = {}, 0
    for message in engine.run([request(key, 6 + key, 4) for key in range(4)]):
        errors |= {ended.key: ended.error for ended in message.ended if ended.error}
        count += len(message.tokens)
    at_fault = {1, 3} if name == "Adds" else {0, 1, 2, 3}
    assert errors.keys() == at_fault
    assert all(isinstance(error, RequestFailed) for error in errors.values())
    assert count == {"Adds": 8, "Accepts": 4, "Applies": 0}[name]
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("name", ["Never", "Raises"])
def test_no_gate_loses_a_request(name: str, bad: Any, simulate: ModuleType) -> None:
    """One that admits nothing leaves one at a time; one that raises is dropped."""
    bad.Raises.calls = 0
    world = simulate.make_harness(plugins=(f"gate=own_bad:{name}",))
    for key in range(6):
        world.engine.add(request(key, 6, 5))
    ended, most = set(), 0
    while world.engine.has_work:
        most = max(most, world.engine.stats().running)
        for deltas in world.engine.step().values():
            ended |= {own.key for own in deltas.ended}
    assert ended == set(range(6))
    assert (most, bad.Raises.calls) == ((1, 0) if name == "Never" else (6, 3))


def test_an_observer_that_raises_is_dropped(bad: Any) -> None:
    bad.Watches.calls = 0
    with LLM(**SETTINGS, plugin=["observer=own_bad:Watches"]) as llm:
        (output,) = llm.generate("a", SamplingParams(max_tokens=20, ignore_eos=True))
    assert (len(output.outputs[0].token_ids), bad.Watches.calls) == (20, 3)
    assert plugins(None, "observer") == []
