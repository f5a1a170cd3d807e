"""The names of ``ray.data.llm``'s engine processor, as a ``RayfinConfig``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.rayllm.config import vLLMEngineProcessorConfig
from rayfin.deployments.rayllm.data_config import RayfinConfig
from rayfin.deployments.rayllm.rows import ADAPTER, Row

ERROR = "__inference_error__"
COLUMNS = {"token_ids": "generated_tokens", "embedding": "embeddings"}
"""Columns of Rayfin's that Ray's processor has under another name."""

DEFAULTS = {"temperature": 1.0, "max_tokens": 16}
"""Of vLLM's ``SamplingParams``, which Ray's processor makes of a row's settings."""


@dataclass(frozen=True, slots=True)
class RayNames:
    """What Ray's processor does around the engine."""

    continues: bool  # a row that fails has its error in a column, and the others go on
    options: Mapping[str, Any] = field(default_factory=dict)  # of map_batches

    def given(self, row: Row) -> Row:
        """A row with Rayfin's names of what the engine reads."""
        if row.get("tokenized_prompt") is not None:
            row = {**row, "prompt_token_ids": row["tokenized_prompt"]}
            row.pop("messages", None)
        if row.get("model") is not None and ADAPTER not in row:
            row = {**row, ADAPTER: row["model"]}
        return row

    def answered(self, row: Row) -> Row:
        """A row with Ray's names of what the engine writes.

        Raises:
            RuntimeError: the row has failed, and that ends the job.
        """
        error = row.pop("error", None)
        if error is not None and not self.continues:
            raise RuntimeError(f"a row has failed: {error}")
        named = {COLUMNS.get(name, name): value for name, value in row.items()}
        return named | ({ERROR: error or ""} if self.continues else {})


def read_ray_config(
    config: vLLMEngineProcessorConfig, chat_template_kwargs: Mapping[str, Any] | None
) -> tuple[RayfinConfig, RayNames]:
    """Returns what runs, and what stands around it.

    Raises:
        InvalidConfig: a field that Rayfin cannot follow.
    """
    engine = {name: value for name, value in config.engine_kwargs.items() if name != "task_type"}
    engine |= config.adapter_settings
    stage = config.chat_template_stage
    settings = stage if isinstance(stage, Mapping) else getattr(stage, "__dict__", {})
    if settings.get("chat_template") is not None:
        engine["chat_template"] = settings["chat_template"]
    variables = chat_template_kwargs or settings.get("chat_template_kwargs")
    if variables:
        engine["default_chat_template_kwargs"] = dict(variables)
    gpus = 1.0 if config.accelerator_type is not None else 0.0
    options: dict[str, Any] = {}
    if config.runtime_env is not None:
        options["runtime_env"] = config.runtime_env
    if config.accelerator_type is not None:
        options["accelerator_type"] = config.accelerator_type
    cpus = None
    if config.placement_group_config is not None:
        bundle = _bundle(config.placement_group_config)
        gpus, cpus = bundle.get("GPU", gpus), bundle.get("CPU")
    runs = RayfinConfig(
        model=config.model_source,
        engine=engine,
        task=config.task_type,
        concurrency=_pool(config.concurrency),
        batch_size=config.batch_size,
        concurrent_batches=config.max_concurrent_batches,
        num_cpus=cpus,
        num_gpus=gpus,
        sampling_params=DEFAULTS if config.task_type == "generate" else {},
    )
    return runs, RayNames(config.should_continue_on_error, options)


def _pool(concurrency: int | tuple[int, int]) -> tuple[int, int]:
    """As Ray has it: a number is the most actors, and one is the least."""
    return (1, concurrency) if isinstance(concurrency, int) else concurrency


def _bundle(places: Mapping[str, Any]) -> Mapping[str, float]:
    """The resources of the one worker."""
    bundles = places.get("bundles") or [places.get("bundle_per_worker")]
    if len(bundles) != 1 or not isinstance(bundles[0], Mapping):
        raise InvalidConfig(
            "placement_group_config: an engine of a dataset is one worker; connect the dataset "
            "with a server of several by RayfinConfig(application=)",
            "placement_group_config",
        )
    first: Mapping[str, float] = bundles[0]
    return first
