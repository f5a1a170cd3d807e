"""When a refused request may try again, from how fast others end."""

import pickle

from rayfin.actors.errors import Overloaded
from rayfin.actors.scheduler.queues.queue_limits import MAX_WAIT, WINDOW_SECONDS, CompletionRate


def test_half_the_queue_at_the_measured_rate() -> None:
    pace = CompletionRate()
    for second in range(20):
        pace.observe(second, 5 * second)  # five a second
    assert pace.seconds_until_half(100, 20, 100) == 10
    assert pace.seconds_until_half(3, 20, 100) == 1
    assert pace.seconds_until_half(10**6, 20, 100) == MAX_WAIT


def test_only_the_last_while_counts() -> None:
    pace = CompletionRate()
    for second in range(100):
        pace.observe(second, 1000 * min(second, 50) + second)  # fast, then one a second
    now = 99 + WINDOW_SECONDS
    pace.observe(now, 50_000 + 99 + 30)
    assert pace.seconds_until_half(20, now, 50_000 + 99 + 30) in (9, 10, 11)


def test_nothing_ends() -> None:
    pace = CompletionRate()
    assert pace.seconds_until_half(10, 0, 0) == MAX_WAIT
    pace.observe(0, 7)
    assert pace.seconds_until_half(10, 9, 7) == MAX_WAIT


def test_the_estimate_crosses_actors() -> None:
    error = pickle.loads(pickle.dumps(Overloaded("full", retry_after=7)))
    assert (error.retry_after, str(error)) == (7, "full")
