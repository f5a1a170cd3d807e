"""A sample of the simulator's lives; ``make simulate SEEDS=10000`` lives more of them."""

from collections import Counter
from types import ModuleType


def test_lives(simulate: ModuleType) -> None:
    """Each is exact, and together they see everything that can happen to an engine."""
    happened: Counter[str] = Counter()
    for seed in range(200):
        try:
            happened += simulate.simulate(seed)
        except Exception as error:
            raise AssertionError(f"python tests/simulate.py --seed {seed}") from error
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
    ):
        assert happened[what] > 10, what
    assert happened["leases"] > 50


def test_a_life_is_its_seed(simulate: ModuleType) -> None:
    for seed in (3, 4, 5):
        lives = [simulate.Life(seed) for _ in range(2)]
        for life in lives:
            life.run()
        first, second = (life.harness for life in lives)
        assert first.history == second.history
        assert first.executor.clock == second.executor.clock
        assert len(first.executor.log) == len(second.executor.log)
