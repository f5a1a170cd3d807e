"""Loads a model once for engines of the same settings that run one after the other."""

import functools
from typing import Any

import pytest

from rayfin.actors.runner import loading, model_runner
from rayfin.actors.runner.model_runner import ModelRunner, RunnerPlugins

_load = functools.lru_cache(maxsize=8)(loading.load)


def make_runner(args: Any, plugins: RunnerPlugins | None = None) -> ModelRunner:
    """Makes a runner over the model of an earlier one, which computes nothing any more.

    A model with layers that draft is loaded: they would be put around it once more.
    """
    if args.speculation is not None and args.speculation.one_device:
        return ModelRunner(args, plugins=plugins)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "load", lambda args, *_: _load(args))
        return ModelRunner(args, plugins=plugins)
