"""``build_processor``: a stage of a Ray Dataset whose actors run a model over its rows."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.rayllm.config import vLLMEngineProcessorConfig
from rayfin.deployments.rayllm.data_config import RayfinConfig, actor_cpus, pool_size
from rayfin.deployments.rayllm.data_names import ERROR, RayNames, read_ray_config
from rayfin.deployments.rayllm.row_engine import RowEngine
from rayfin.deployments.rayllm.rows import OUTPUTS, Row

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
        names: RayNames | None = None,
        map_kwargs: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    ) -> None:
        self.config = config
        self._preprocess = preprocess
        self._postprocess = postprocess
        self._names = names
        self._before, self._after = map_kwargs

    def __call__(self, dataset: "ray.data.Dataset") -> "ray.data.Dataset":
        """Adds the stages; nothing runs before the dataset is read."""
        from ray.data import ActorPoolStrategy

        config = self.config
        names = self._names
        if self._preprocess is not None:
            dataset = dataset.map(_beside(self._preprocess), **self._before)
        if names is not None:
            dataset = dataset.map(names.given)
        least, largest = pool_size(config)
        dataset = dataset.map_batches(
            RayfinRows,
            fn_constructor_kwargs={"config": config},
            batch_size=config.batch_size,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(
                min_size=least,
                max_size=largest,
                max_concurrent_calls_per_actor=config.concurrent_batches,
            ),
            num_cpus=actor_cpus(config),
            num_gpus=config.num_gpus or None,
            udf_modifying_row_count=False,
            **(names.options if names is not None else {}),
        )
        if names is not None:
            dataset = dataset.map(names.answered)
        if self._postprocess is None:
            return dataset
        return dataset.map(_unless_failed(self._postprocess), **self._after)


def build_processor(
    config: RayfinConfig | vLLMEngineProcessorConfig,
    preprocess: RowFunction | None = None,
    postprocess: RowFunction | None = None,
    preprocess_map_kwargs: Mapping[str, Any] | None = None,
    postprocess_map_kwargs: Mapping[str, Any] | None = None,
    builder_kwargs: Mapping[str, Any] | None = None,
) -> Processor:
    """Returns what adds the model's stage to a dataset.

    Args:
        config: with Ray's, columns have Ray's names.
        preprocess: makes the columns that the task reads of a row; its other columns are kept.
        postprocess: makes the row that comes out, of all columns.
        preprocess_map_kwargs, postprocess_map_kwargs: of ``Dataset.map``, for these two.
        builder_kwargs: Ray's: ``chat_template_kwargs`` alone.

    Raises:
        InvalidConfig: Ray Data's packages are missing.
    """
    try:
        import ray.data  # noqa: F401
    except ImportError:
        raise InvalidConfig(NO_RAY_DATA) from None
    names, given = None, dict(builder_kwargs or {})
    if isinstance(config, vLLMEngineProcessorConfig):
        config, names = read_ray_config(config, given.pop("chat_template_kwargs", None))
    if given:
        raise InvalidConfig(
            f"builder_kwargs has {', '.join(given)}, which is none", "builder_kwargs"
        )
    map_kwargs = (preprocess_map_kwargs or {}, postprocess_map_kwargs or {})
    return Processor(config, preprocess, postprocess, names, map_kwargs)


def _beside(function: RowFunction) -> RowFunction:
    """A row's own columns, and over them what the function makes of it."""
    return lambda row: {**row, **function(row)}


def _unless_failed(function: RowFunction) -> RowFunction:
    """The function for rows that have been answered; of Ray's names, others pass as they are."""

    def answered(row: Row) -> Row:
        if row.get(ERROR):
            return row
        return {**function(row), ERROR: ""} if ERROR in row else function(row)

    return answered


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
