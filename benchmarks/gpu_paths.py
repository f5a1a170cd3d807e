"""Which path the steps of an inline engine take, so that a benchmark times the one it names."""

import time
from collections.abc import Callable
from typing import Any

from rayfin import LLM


def runner_of(llm: LLM) -> Any:
    """The model runner of an inline engine, whose insides the benchmarks look at."""
    engine: Any = llm._engine
    return engine._engine._pipeline._executor._runner


class Paths:
    """Counts the decode steps of an engine: as graphs, queued behind others, kernel by kernel.

    ``prompts`` are the steps with prompts in them, which took ``prompt_seconds`` of the runner: if
    they are graphs, until they were queued.
    """

    def __init__(self, llm: LLM) -> None:
        self._runner = runner_of(llm)
        self.replayed = self.behind = self.eager = self.prompts = 0
        self.prompt_seconds = 0.0
        forward = self._runner._forward
        self._advance: Callable[..., Any] = forward.run
        forward.run = self._count_eager
        if self._runner._graphs is not None:
            self._begin: Callable[..., Any] = self._runner._graphs.begin
            self._runner._graphs.begin = self._count_replayed

    def expect(self, *, graphs: bool) -> None:
        """Raises if the engine is not on the GPU's decoder, or decodes on another path.

        ``graphs``: all decode steps are replayed graphs, and most of them queued behind others.
        """
        runner = self._runner
        assert runner._loaded.gpu_model is not None, "the model runs on transformers' modules"
        assert (runner._graphs is not None) == graphs, "the engine has no graphs, or should not"
        counts = f"{self.replayed} replayed ({self.behind} behind others), {self.eager} eager"
        if graphs:
            assert self.replayed and not self.eager, f"decode steps left the graphs: {counts}"
            assert self.behind > self.replayed // 2, f"the device waited for the host: {counts}"
        else:
            assert self.eager and not self.replayed, f"these steps should be eager: {counts}"

    def _count_replayed(self, info: Any, rules: Any) -> Any:
        if len(info.ids) > info.decoding_batch:
            return self._time_prompts(self._begin, info, rules)
        self.behind += info.num_steps if self._runner._graphs.queued else 0
        self.replayed += info.num_steps
        return self._begin(info, rules)

    def _count_eager(self, info: Any, output: Any) -> Any:
        if len(info.ids) == info.decoding_batch:
            self.eager += 1
            return self._advance(info, output)
        return self._time_prompts(self._advance, info, output)

    def _time_prompts(self, run: Callable[..., Any], *given: Any) -> Any:
        started = time.perf_counter()
        result = run(*given)
        self.prompts += 1
        self.prompt_seconds += time.perf_counter() - started
        return result
