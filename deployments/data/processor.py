"""``build_processor``: a stage of a Ray Dataset whose actors run a model over its rows."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.data.config import RayfinConfig, actor_cpus, pool_size
from rayfin.deployments.data.row_engine import RowEngine
from rayfin.deployments.data.rows import OUTPUTS, Row

if TYPE_CHECKING:
    import pyarrow
    import ray.data

RowFunction = Callable[[Row], Row]

NO_RAY_DATA = "rayfin.data needs some packages: pip install -e '.[data]'"


class RayfinRows:
    """The callable class of ``Dataset.map_batches`` with ``batch_format="pyarrow"``.

    A table comes back with its own columns and those of the task (``OUTPUTS``), its rows in their
    order. Calls may overlap.
    """

    def __init__(self, config: RayfinConfig) -> None:
        self._task = config.task
        self._engine = RowEngine(config)

    async def __call__(self, batch: "pyarrow.Table") -> "pyarrow.Table":
        read = [name for name in self._engine.columns if name in batch.column_names]
        rows = batch.select(read).to_pylist() if read else [{} for _ in range(batch.num_rows)]
        answers = await self._engine.answer(rows)
        types = column_types()
        import pyarrow

        for name in OUTPUTS[self._task]:
            values = pyarrow.array([row[name] for row in answers], types[name])
            if name in batch.column_names:
                batch = batch.drop_columns([name])
            batch = batch.append_column(name, values)
        return batch

    def close(self) -> None:
        """Frees the model."""
        self._engine.close()


class Processor:
    """Runs ``config`` over a dataset: ``processor(dataset)`` is another dataset."""

    def __init__(
        self,
        config: RayfinConfig,
        preprocess: RowFunction | None = None,
        postprocess: RowFunction | None = None,
    ) -> None:
        self.config = config
        self._preprocess = preprocess
        self._postprocess = postprocess

    def __call__(self, dataset: "ray.data.Dataset") -> "ray.data.Dataset":
        """Adds the stages; nothing runs before the dataset is read."""
        from ray.data import ActorPoolStrategy

        config = self.config
        if self._preprocess is not None:
            dataset = dataset.map(_beside(self._preprocess))
        least, most = pool_size(config)
        dataset = dataset.map_batches(
            RayfinRows,
            fn_constructor_kwargs={"config": config},
            batch_size=config.batch_size,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                min_size=least,
                max_size=most,
                max_concurrent_calls_per_actor=config.concurrent_batches,
            ),
            num_cpus=actor_cpus(config),
            num_gpus=config.num_gpus or None,
            udf_modifying_row_count=False,
        )
        return dataset if self._postprocess is None else dataset.map(self._postprocess)


def build_processor(
    config: RayfinConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
) -> Processor:
    """Returns what adds the model's stage to a dataset.

    Args:
        preprocess: makes the columns that the task reads of a row; its other columns are kept.
        postprocess: makes the row that comes out, of all columns.

    Raises:
        InvalidConfig: Ray Data's packages are missing.
    """
    try:
        import ray.data  # noqa: F401
    except ImportError:
        raise InvalidConfig(NO_RAY_DATA) from None
    return Processor(config, preprocess, postprocess)


def _beside(function: RowFunction) -> RowFunction:
    """A row's own columns, and over them what the function makes of it."""
    return lambda row: {**row, **function(row)}


def column_types() -> "dict[str, pyarrow.DataType]":
    """Of all columns that tasks add: the same in every block, whatever its rows hold."""
    import pyarrow

    text, count = pyarrow.string(), pyarrow.int32()
    numbers = pyarrow.list_(pyarrow.float32())
    return {
        **dict.fromkeys(("generated_text", "finish_reason", "reasoning", "tool_calls"), text),
        **dict.fromkeys(("label", "error"), text),
        **dict.fromkeys(("num_input_tokens", "num_generated_tokens"), count),
        **dict.fromkeys(("embedding", "probs"), numbers),
        "token_ids": pyarrow.list_(count),
        "score": pyarrow.float64(),
    }
