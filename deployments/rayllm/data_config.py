"""What ``rayfin.data`` runs: a model and its task, in a pool of actors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.serve.model_args import ModelArgs, one_model

Task = Literal["generate", "embed", "classify", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RayfinConfig:
    """A model over the rows of a dataset. Its shape is that of ``ray.data.llm``'s configs.

    Args:
        model: a local folder, a Hugging Face name, or "demo"; of a server or an application, the
            name that it serves.
        engine: settings of the engine and its templates, as ``LLM`` takes them.
        task: what is asked of each row.
        concurrency: actors, each with an engine; a pair is the least and the most.
        batch_size: rows that an actor gets together.
        concurrent_batches: batches that an actor works on at once, so that a long row of one does
            not hold up the others.
        num_cpus: of each actor, 1 by default; without a GPU, its threads.
        num_gpus: of each actor.
        sampling_params: fields of the body of every row; those of a row win.
        seed: of rows that are sampled and give no seed; a row computed again has the same text.
        row_id: a column that tells equal rows apart, for their seeds.
        url: a running server answers, and the actors hold no engine.
        api_key: of that server.
        application: the engines of a running application of that name answer, in the background
            of its other requests.

    Raises:
        InvalidConfig: a value is unknown or out of its range.
    """

    model: str = "demo"
    engine: Mapping[str, Any] = field(default_factory=dict)
    task: Task = "generate"
    concurrency: int | tuple[int, int] = 1
    batch_size: int = 64
    concurrent_batches: int = 4
    num_cpus: float | None = None
    num_gpus: float = 0.0
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    row_id: str | None = None
    url: str | None = None
    api_key: str | None = None
    application: str | None = None

    def __post_init__(self) -> None:
        tasks = get_args(Task)
        if self.task not in tasks:
            raise InvalidConfig(f"task must be one of {', '.join(tasks)}, got {self.task}", "task")
        for name in ("batch_size", "concurrent_batches"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name} must be at least 1", name)
        least, largest = pool_size(self)
        if not 1 <= least <= largest:
            rule = "concurrency must be at least 1, and the least at most the most"
            raise InvalidConfig(rule, "concurrency")
        if self.url and self.application:
            raise InvalidConfig("url and application exclude each other", "application")
        if self.engine and (self.url or self.application):
            raise InvalidConfig("engine has no meaning where another one answers", "engine")
        model_args(self)


def pool_size(config: RayfinConfig) -> tuple[int, int]:
    """The least and the most actors."""
    count = config.concurrency
    return (count, count) if isinstance(count, int) else (count[0], count[1])


def actor_cpus(config: RayfinConfig) -> float:
    """CPUs of each actor; those that hold no engine wait most of the time."""
    if config.num_cpus is not None:
        return config.num_cpus
    return 0.1 if config.url or config.application else 1.0


def model_args(config: RayfinConfig) -> ModelArgs:
    """The engine of one actor.

    Raises:
        InvalidConfig: a setting is unknown or of the wrong type.
    """
    settings = {"model": config.model, **config.engine}
    if not config.num_gpus:
        settings.setdefault("threads", max(1, int(actor_cpus(config))))
    return one_model(settings)
