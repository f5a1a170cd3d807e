"""A sample of the simulator's lives; ``make simulate SEEDS=10000`` lives more of them."""

from collections import Counter
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.slow(reason="thousands of requests")


def test_lives(simulate: ModuleType) -> None:
    """Each is exact, and together they see everything that can happen to an engine."""
    happened: Counter[str] = Counter()
    for seed in range(200):
        try:
            happened += simulate.simulate(seed)
        except Exception as error:
            raise AssertionError(f"python tools/simulate.py --seed {seed}") from error
    for what in (
        "stop",
        "length",
        "abort",
        "error",
        "preemptions",
        "swaps",
        "restarts",
        "prefix hits",
        "forks",
        "searches",
        "adapters",
        "names moved",
        "images",
        "turns of sessions",
        "lapses",
        "pages of peers",
        "pages peers lack",
        "new weights",
        "sleeps",
        "weights changed asleep",
    ):
        assert happened[what] > 10, what
    assert happened["leases"] > 50


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_a_long_life(simulate: ModuleType, seed: int) -> None:
    """It outlives its faults, and forgets what is over; ``make simulate REQUESTS=100000``."""
    life = simulate.LongLife(seed, 400)
    life.run()
    harness = life.harness
    assert harness.num_added >= 400 and not harness.executor.streams
    assert len(harness.executor.log) <= 1 + life.SWEEP
    assert harness.engine.stats().finished["length"] > 100


def test_a_life_is_its_seed(simulate: ModuleType) -> None:
    for seed in (3, 4, 5):
        lives = [simulate.Life(seed) for _ in range(2)]
        for life in lives:
            life.run()
        first, second = (life.harness for life in lives)
        assert first.history == second.history
        assert first.executor.clock == second.executor.clock
        assert len(first.executor.log) == len(second.executor.log)


def test_where_all_contexts_fit_sessions_change_nothing(simulate: ModuleType) -> None:
    turns = 0
    for seed in range(40):
        lives = []
        for sessions in (True, False):
            limits = {"max_waiting_requests": 1000, "max_waiting_tokens": None}
            settings = {"sessions": sessions, "windows": None, "num_pages": 2000, **limits}

            class Roomy(simulate.Life):  # type: ignore[name-defined, misc]
                def _settings(self, settings: dict[str, Any] = settings) -> dict[str, Any]:
                    return {**super()._settings(), **settings}

            lives.append(Roomy(seed))
            if not lives[-1].share_of_turns:
                break
            lives[-1].run()
        else:
            turns += _alike(*lives)
    assert turns > 50


def _alike(first: Any, second: Any) -> int:
    """Two lives are the same; returns the turns of sessions in one."""
    on, off = first.harness, second.harness
    assert on.history == off.history and on.executor.entered == off.executor.entered
    assert on.executor.clock == off.executor.clock
    turns: int = first.num_turns
    return turns
