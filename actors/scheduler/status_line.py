"""A log line every few seconds while an engine works."""

import threading
import time
from collections.abc import Callable

from rayfin.actors.metrics.engine_stats import EngineStats
from rayfin.actors.timing import STATUS_LINE_SECONDS


class StatusLine:
    """Renders what the engine did since the last line, like vLLM's periodic log."""

    def __init__(self, before: EngineStats, now: float) -> None:
        self._before = before
        self._at = now

    def render(self, stats: EngineStats, now: float) -> str | None:
        """Returns the line for the time until ``now``, in seconds, or None if the engine idled."""
        before, seconds = self._before, max(now - self._at, 1e-9)
        self._before, self._at = stats, now
        prompts = stats.prompt_tokens - before.prompt_tokens
        outputs = stats.generation_tokens - before.generation_tokens
        if not (stats.running or stats.waiting or prompts or outputs):
            return None
        queries = stats.prefix_queries - before.prefix_queries
        hits = (stats.prefix_hits - before.prefix_hits) / queries if queries else 0.0
        return (
            f"running {stats.running}, waiting {stats.waiting}, "
            f"pages {stats.pages_held}/{stats.pages_total}, "
            f"prompts {prompts / seconds:.1f} tokens/s, outputs {outputs / seconds:.1f} tokens/s, "
            f"prefix hits {hits:.0%}, preemptions {stats.preemptions - before.preemptions}"
        )


def watch(stats: Callable[[], EngineStats], write: Callable[[str], None]) -> None:
    """Writes the lines from a new thread, which also calls ``stats``."""
    line = StatusLine(stats(), time.monotonic())

    def run() -> None:
        while True:
            time.sleep(STATUS_LINE_SECONDS)
            text = line.render(stats(), time.monotonic())
            if text is not None:
                write(text)

    threading.Thread(target=run, name="status line", daemon=True).start()
