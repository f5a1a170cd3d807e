"""The line about an engine: right when it works, none when it is idle."""

from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.scheduler.stats import StatusLine


def test_what_it_says() -> None:
    line = StatusLine(EngineStats(prompt_tokens=100, generation_tokens=10), 5.0)
    busy = EngineStats(
        running=2, waiting=1, pages_held=7, pages_total=64, prompt_tokens=200,
        generation_tokens=60, prefix_queries=80, prefix_hits=20, preemptions=1,
    )  # fmt: skip
    assert line.render(busy, 15.0) == (
        "running 2, waiting 1, pages 7/64, prompts 10.0 tokens/s, outputs 5.0 tokens/s, "
        "prefix hits 25%, preemptions 1"
    )
    still = line.render(busy, 25.0)
    assert still is not None and "prompts 0.0 tokens/s" in still and "hits 0%" in still


def test_nothing_about_an_idle_engine() -> None:
    line = StatusLine(EngineStats(), 0.0)
    assert line.render(EngineStats(), 10.0) is None
    done = EngineStats(prompt_tokens=5, generation_tokens=1)
    assert line.render(done, 20.0) is not None  # it came and went between two lines
    assert line.render(done, 30.0) is None
