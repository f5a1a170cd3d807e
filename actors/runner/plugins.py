"""What a runner takes from outside its room: each is one file that implements one contract."""

from collections.abc import Callable
from dataclasses import dataclass

from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.observers import StepObserver
from rayfin.actors.runner.sampling.processor import ProcessorFactory
from rayfin.actors.runner.speculation.interface import Proposer


@dataclass(frozen=True, slots=True)
class RunnerPlugins:
    """Further parts of a `ModelRunner`; README.md says how to write one of each kind."""

    processors: tuple[ProcessorFactory, ...] = ()  # before the default ones
    observers: tuple[StepObserver, ...] = ()
    proposer: Callable[[], Proposer] | None = None  # made anew when the runner starts
    wrap_model: Callable[[StepModel], StepModel] | None = None  # without graphs
