"""The classes of ``ray.serve.llm``'s and ``ray.data.llm``'s configurations: fields and defaults.

``translate.py`` says what each field becomes. Objects of Ray's own classes are taken too.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from rayfin.actors.buckets.folder import is_bucket
from rayfin.actors.errors import InvalidConfig

ENGINES = ("vLLM",)
BUCKETS = ("s3://", "gs://", "abfss://", "azure://")
STRATEGIES = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


def _plain(value: Any) -> Any:
    """A configuration of Ray's as a dict, or the one that a YAML file holds."""
    if isinstance(value, BaseModel) and not isinstance(value, RayConfig):
        return value.model_dump(exclude_unset=True)
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):
        if not Path(value).is_file():
            raise ValueError(f"there is no file {value}")
        return yaml.safe_load(Path(value).read_text(encoding="utf-8"))
    return value


def no_such_field(name: str, known: Iterable[str]) -> str:
    """Says so, with the nearest name."""
    near = get_close_matches(name, [*known], 1)
    return f"{name}: there is no such field" + (f"; near it is {near[0]}" if near else "")


class RayConfig(BaseModel):
    """What all have in common."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), arbitrary_types_allowed=True)

    @model_validator(mode="before")
    @classmethod
    def _has_known_fields(cls, given: Any) -> Any:
        if cls.model_config["extra"] == "forbid" and isinstance(given, dict):
            for name in given.keys() - cls.model_fields.keys():
                raise ValueError(no_such_field(str(name), cls.model_fields))
        return given

    @classmethod
    def parse_yaml(cls, file: Any) -> Self:
        """Reads one from a YAML text or an open file."""
        return cls.model_validate(yaml.safe_load(file))

    @classmethod
    def from_file(cls, path: str) -> Self:
        """Reads one from a YAML file."""
        return cls.parse_yaml(Path(path).read_text(encoding="utf-8"))


class CloudMirrorConfig(RayConfig):
    """A bucket that has the files of a model."""

    bucket_uri: str | None = None
    extra_files: list[dict[str, Any]] = Field(default_factory=list)

    @field_validator("bucket_uri")
    @classmethod
    def _is_bucket(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(BUCKETS):
            raise ValueError(f"bucket_uri must begin with {', '.join(BUCKETS)}; got {value}")
        return value


class ModelLoadingConfig(RayConfig):
    """What a model is called, and where it comes from."""

    model_id: str = Field(min_length=1)
    model_source: Annotated[str | CloudMirrorConfig | None, BeforeValidator(_plain)] = None
    tokenizer_source: str | None = None


class LoraConfig(RayConfig):
    """Where adapters come from, and how many an engine holds."""

    dynamic_lora_loading_path: str | None = None
    max_num_adapters_per_replica: PositiveInt = 16
    download_timeout_s: float | None = 30
    max_download_tries: int = 3

    def settings(self, limited: bool = True) -> dict[str, Any]:
        """Returns Rayfin's settings, with the number of adapters if it is ``limited``.

        Raises:
            InvalidConfig: the path is neither a folder nor a bucket.
        """
        path = self.dynamic_lora_loading_path
        if path is not None and "://" in path and not is_bucket(path):
            name = "dynamic_lora_loading_path"
            raise InvalidConfig(f"{name} {path}: no such address is read; mount it", name)
        folder = {} if path is None else {"lora_dir": path.rstrip("/")}
        return folder | ({"max_loras": self.max_num_adapters_per_replica} if limited else {})

    def without_effect(self) -> list[str]:
        """Returns the paths of fields that are set and say nothing here."""
        names = {"download_timeout_s", "max_download_tries"} & self.model_fields_set
        return [f"lora_config.{name}" for name in sorted(names)]


class AcceleratorConfig(RayConfig):
    """The kind of hardware."""

    kind: Literal["cpu", "gpu", "tpu"]
    topology: str | None = None


class Bundle(RayConfig):
    """The resources of one worker; others than these two may stand beside them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float] = Field(init=False)

    CPU: float = Field(0.0, ge=0)
    GPU: float = Field(0.0, ge=0)


class PlacementGroupConfig(RayConfig):
    """The workers' places."""

    bundle_per_worker: Bundle | None = None
    bundles: list[Bundle] | None = None
    strategy: STRATEGIES = "PACK"

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if (self.bundle_per_worker is None) == (self.bundles is None):
            raise ValueError("placement_group_config has either bundle_per_worker or bundles")
        return self


class LLMConfig(RayConfig):
    """One model: its engine, its place, its number of replicas."""

    runtime_env: dict[str, Any] | None = None
    model_loading_config: Annotated[ModelLoadingConfig, BeforeValidator(_plain)]
    llm_engine: str = "vLLM"
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    accelerator_type: str | None = None
    accelerator_config: Annotated[AcceleratorConfig | None, BeforeValidator(_plain)] = None
    placement_group_config: Annotated[PlacementGroupConfig | None, BeforeValidator(_plain)] = None
    lora_config: Annotated[LoraConfig | None, BeforeValidator(_plain)] = None
    deployment_config: dict[str, Any] = Field(default_factory=dict)
    server_cls: Any = None
    experimental_configs: dict[str, Any] = Field(default_factory=dict)
    log_engine_metrics: bool | None = True
    callback_config: Any = None

    @property
    def adapters(self) -> LoraConfig | None:
        """Where its adapters come from."""
        return self.lora_config

    @property
    def model_id(self) -> str:
        """What clients call the model."""
        return self.model_loading_config.model_id

    @field_validator("llm_engine")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value not in ENGINES:
            raise ValueError(f"llm_engine must be 'vLLM', whose settings Rayfin reads; got {value}")
        return value

    @field_validator("runtime_env")
    @classmethod
    def _has_texts(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        variables = (value or {}).get("env_vars") or {}
        if not isinstance(variables, dict) or {*map(type, variables.values())} - {str}:
            raise ValueError("env_vars must be an object of strings")
        return value

    @field_validator("accelerator_type")
    @classmethod
    def _is_one_of_rays(cls, value: str | None) -> str | None:
        return "A10G" if value == "A10" else value


class LLMServingArgs(RayConfig):
    """The models of an application; settings of ``rayfin serve`` may stand beside them."""

    model_config = ConfigDict(extra="allow")

    llm_configs: list[Annotated[LLMConfig, BeforeValidator(_plain)]] = Field(min_length=1)
    ingress_cls_config: Any = None
    ingress_deployment_config: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _are_apart(self) -> Self:
        names = [config.model_id for config in self.llm_configs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"llm_configs: two models have the model_id {name!r}")
        return self


class vLLMEngineProcessorConfig(RayConfig):
    """A model over the rows of a dataset: Ray's fields and defaults.

    A stage that is switched off leaves its work to the rows: they have ``prompt`` instead of
    ``messages``, or ``tokenized_prompt``. Without effect are max_pending_requests,
    max_tasks_in_flight_per_actor, log_engine_metrics, and what else stages have.
    """

    model_source: str
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    task_type: Literal["generate", "embed", "classify", "score"] = "generate"
    batch_size: int = Field(32, ge=1)
    concurrency: int | tuple[int, int] = 1
    accelerator_type: str | None = None
    runtime_env: dict[str, Any] | None = None
    max_pending_requests: int | None = None
    max_concurrent_batches: int = Field(8, ge=1)
    max_tasks_in_flight_per_actor: int | None = None
    should_continue_on_error: bool = False
    log_engine_metrics: bool = True
    dynamic_lora_loading_path: str | None = None
    placement_group_config: dict[str, Any] | None = None
    chat_template_stage: Any = True
    tokenize_stage: Any = True
    detokenize_stage: Any = True
    prepare_multimodal_stage: Any = False

    @property
    def adapter_settings(self) -> dict[str, Any]:
        """Rayfin's settings of its adapters."""
        return LoraConfig(dynamic_lora_loading_path=self.dynamic_lora_loading_path).settings(False)
