"""The oracle and the hash runner say the same, and the runner notices a history that is wrong."""

import importlib.util
import inspect
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import adapter_files
import image_model
import jsonschema
import numpy as np
import pytest
from load import WEATHER, Ask, Asks
from oracle import FIRST, VOCAB_SIZE, HashOracle, ModelOracle

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs, resolve
from rayfin.actors.errors import NumericalError, RequestFailed
from rayfin.actors.failpoints import Failpoints
from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.scheduler.engine import Engine
from rayfin.deployments.serve.preflight import DEMO_FOLDER


@pytest.fixture(scope="module")
def hash_runner() -> ModuleType:
    """worker/hash_runner.py, with steps that take no time."""
    path = Path(__file__).parents[3] / "tools" / "chaos" / "worker" / "hash_runner.py"
    spec = importlib.util.spec_from_file_location("hash_runner", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.STEP_SECONDS = 0.0  # type: ignore[attr-defined]
    return module


class Inline:
    """An ``Executor`` on a hash runner in this process."""

    def __init__(self, runner: Any, config: Any) -> None:
        self.epoch = 0
        self._runner, self._config = runner, config
        runner.start(config, 0)

    def submit(self, info: Any) -> Any:
        result = self._runner.execute(info)

        class Done:
            def result(self) -> Any:
                return result

        return Done()

    def restart(self) -> None:
        self.epoch += 1
        self._runner.start(self._config, self.epoch)


def tokens_of(
    hash_runner: ModuleType, ask: Ask, output: list[int], prompt_len: int = 0
) -> list[int]:
    """What an engine on a hash runner says; ``output`` was said before, by another one."""
    args = EngineArgs(kv_cache_memory=64 * 1024, steps_in_flight=1, kv_peers=False)
    runner = hash_runner.ModelRunner(args)
    engine = Engine(
        resolve(args, *runner.profile()), Inline(runner, resolve(args, *runner.profile()))
    )
    sampling = Sampling(
        seed=ask.seed, **{k: v for k, v in ask.settings.items() if k != "temperature"}
    )
    rules = StopRules(ask.max_tokens, frozenset(ask.stop_token_ids))
    prompt = np.array(ask.prompt, np.int32)
    engine.add(EngineRequest("r", prompt, sampling, rules, client="c", output=list(output)))
    said = list(output)
    while engine.has_work:
        for message in engine.step().values():
            assert all(ended.error is None for ended in message.ended)
            said += message.tokens.tolist()
    return said


@pytest.mark.parametrize("number", range(6))
def test_an_engine_says_what_the_oracle_says(hash_runner: ModuleType, number: int) -> None:
    """From the start, and when it goes on where another engine stopped."""
    asks = Asks(number, (20, 60))
    ask = asks.stream()
    while ask.stop or ask.n > 1:  # what happens to text happens elsewhere
        ask = asks.stream()
    (expected,) = HashOracle().expect([ask])
    (choice,) = expected.choices
    assert tokens_of(hash_runner, ask, []) == choice.tokens
    half = choice.tokens[: len(choice.tokens) // 2]
    assert tokens_of(hash_runner, ask, half) == choice.tokens
    assert min(choice.tokens) >= FIRST and max(choice.tokens) < VOCAB_SIZE


@pytest.mark.parametrize(("action", "error"), [("raise", RequestFailed), ("nan", NumericalError)])
def test_a_row_that_is_planted_to_fail_fails_alone(
    hash_runner: ModuleType, monkeypatch: pytest.MonkeyPatch, action: str, error: type
) -> None:
    monkeypatch.setattr(failpoints, "ACTIVE", Failpoints(f"runner.row={action}@token:100"))
    args = EngineArgs(kv_cache_memory=64 * 1024)
    config = resolve(args, *hash_runner.ModelRunner(args).profile())
    engine = Engine(config, Inline(hash_runner.ModelRunner(args), config))
    for key, last in enumerate((99, 100)):
        prompt = np.array([300, 301, last], np.int32)
        engine.add(EngineRequest("r", prompt, Sampling(), StopRules(5), client="c", key=key))
    ended = {}
    while engine.has_work:
        for message in engine.step().values():
            ended |= {each.key: each for each in message.ended}
    assert ended[0].error is None and type(ended[1].error) is error


def test_a_lost_token_changes_all_that_follows(hash_runner: ModuleType) -> None:
    ask = Asks(1).short()
    (expected,) = HashOracle().expect([Ask("a", ask.prompt, 30, 5)])
    tokens = expected.choices[0].tokens
    resumed = tokens_of(hash_runner, Ask("a", ask.prompt, 30, 5), [*tokens[:4], *tokens[5:10]])
    assert not set(resumed[9:]) & set(tokens[9:14])


def test_a_wrong_history_is_seen(hash_runner: ModuleType) -> None:
    new = hash_runner.NewRequest(
        0, Sampling(), 10, history=np.array([1, 2, 3], np.int32), prompt_len=2
    )
    right = np.array([1, 2, 3, 4], np.int32)
    assert hash_runner.history_is_right(new, right)
    assert not hash_runner.history_is_right(new, np.array([1, 2, 4, 4], np.int32))
    new.history = None
    assert not hash_runner.history_is_right(new, right)


def test_stop_strings_cut_the_text_and_end_the_tokens() -> None:
    plain = Ask("a", (300, 301), 40, 3)
    (expected,) = HashOracle().expect([plain])
    text = expected.choices[0].text
    stop = text[10:13]
    (cut,) = HashOracle().expect([Ask("a", (300, 301), 40, 3, stop=(stop,))])
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].tokens == expected.choices[0].tokens[: len(cut.choices[0].tokens)]


def test_asks_are_the_same_for_the_same_seed() -> None:
    first, second = Asks(7), Asks(7)
    assert [first.stream() for _ in range(20)] == [second.stream() for _ in range(20)]
    kinds = {Asks(seed).stream().name.split("-")[0] for seed in range(60)}
    assert kinds == {"greedy", "seeded", "penalties", "stop", "two"}


def test_the_fake_runner_is_called_as_the_real_one(hash_runner: ModuleType) -> None:
    """Nothing that product code calls or reads of the ModelRunner that it replaces is missing."""
    real, fake = vars(ModelRunner), vars(hash_runner.ModelRunner)
    names = {name for name in real if not name.startswith("_")} | {"__init__"}
    assert sorted(names - set(fake)) == []
    for name in names:
        assert type(fake[name]) is type(real[name]), name
        if callable(real[name]):
            takes = [list(inspect.signature(each[name]).parameters) for each in (fake, real)]
            assert takes[0] == takes[1], name


def test_a_models_oracle_answers_with_the_adapter(tmp_path: Path) -> None:
    """Each ask by its own, which says something else than the others and the base model."""
    made = adapter_files.make(str(DEMO_FOLDER), tmp_path, ["a", "b"])
    oracle = ModelOracle("demo", made)
    asks = [Ask(name or "base", (300, 400, 500), 12, 3, adapter=name) for name in ("", "a", "b")]
    together = [expected.choices[0].tokens for expected in oracle.expect(asks)]
    alone = [oracle.expect([ask])[0].choices[0].tokens for ask in asks]
    assert together == alone and len({tuple(tokens) for tokens in together}) == 3
    assert [ask.body("demo")["model"] for ask in asks] == ["demo", "a", "b"]


def test_asks_take_adapters_only_where_there_are_some() -> None:
    assert {Asks(1).stream().adapter for _ in range(5)} == {""}
    asks = Asks(1, adapters=["a", "b"])
    assert {asks.short().adapter for _ in range(40)} == {"", "a", "b"}


def test_a_models_oracle_sees_pictures(tmp_path: Path) -> None:
    """The same question about others is answered otherwise, alone as beside others."""
    image_model.make(tmp_path)
    oracle = ModelOracle(str(tmp_path))
    asks = [
        Ask(f"looking-{at}", (), 12, 3, question="What?", pictures=shown)
        for at, shown in enumerate([(1,), (2,), (1, 2), (2, 1)])
    ]
    asks.append(Ask("text", (300, 400, 500), 12, 3))
    together = oracle.expect(asks)
    alone = [oracle.expect([ask])[0] for ask in asks]
    assert together == alone
    said = {tuple(expected.choices[0].tokens) for expected in together}
    assert len(said) == len(asks)
    one, two = together[0].prompt_tokens, together[2].prompt_tokens
    assert two - one == (image_model.PIXELS // image_model.PATCH) ** 2


def test_the_model_calls_a_tool_that_it_is_free_to_call() -> None:
    """Its arguments follow the strict schema; it may also answer in words."""
    ask = Asks(1, forms=True).asking()
    quiet = replace(ask, name="quiet", question="Hello")
    called, said = ModelOracle("demo").expect([ask, quiet])
    (choice,) = called.choices
    assert choice.finish_reason == "tool_calls" and len(choice.calls) == 1
    assert len(choice.tokens) > 60
    arguments = json.loads(choice.called.partition("<get_weather>")[2])
    jsonschema.validate(arguments, WEATHER["parameters"])
    assert said.choices[0].calls == []
