"""Rayfin itself, in one process."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from peer import serve

import rayfin
from rayfin.actors.adapters.files import read_folder
from rayfin.actors.config import EngineArgs, resolve
from rayfin.actors.messages import AdapterRef, EngineRequest, Sampling, StopRules
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.scheduler.engine import Engine


class Rayfin:
    """An Engine over an inline runner. With the setting ``adapters``, a folder of folders, requests
    take those in turn."""

    version = f"rayfin {rayfin.__version__}"

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        folder = settings.pop("adapters", None)
        paths = sorted(map(str, Path(folder).iterdir())) if folder else []
        self._adapters = [AdapterRef(read_folder(path).digest, path, path) for path in paths]
        args = EngineArgs.from_dict({"model": model, "max_lease": 1, **settings})
        runner = ModelRunner(args)
        config = resolve(args, *runner.profile())
        self._engine = Engine(config, InlineExecutor(runner, config))

    def add(self, index: int, prompt: list[int], output_tokens: int) -> None:
        request = EngineRequest(
            str(index),
            np.array(prompt, np.int32),
            Sampling(),
            StopRules(output_tokens),
            key=index,
        )
        if self._adapters:
            request.use(self._adapters[index % len(self._adapters)])
        self._engine.add(request)

    def step(self) -> Iterable[tuple[int, int]]:
        for deltas in self._engine.step().values():
            for ended in deltas.ended:
                if ended.error is not None:
                    raise ended.error
            yield from ((key, 1) for key in deltas.keys.tolist())


if __name__ == "__main__":
    serve(Rayfin)
