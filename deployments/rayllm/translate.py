"""What the fields of ``ray.serve.llm`` become: settings of Rayfin and options of Serve.

Each field is taken, accepted without effect, or refused with the reason (docs/from-ray.md).
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema

from rayfin.actors.buckets.folder import is_bucket
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.rayllm.config import LLMConfig, LLMServingArgs, no_such_field
from rayfin.deployments.serve.model_args import ModelArgs, read_engine_kwargs, several_models
from rayfin.deployments.serve.server_args import AppArgs, ServerArgs, split_args

logger = logging.getLogger(__name__)

ELSEWHERE = {
    "model": "model_loading_config.model_source",
    "served_model_name": "model_loading_config.model_id",
    "host": "http_options of Serve",
    "port": "http_options of Serve",
    "tensorizer_uri": "a folder of safetensors",
}
"""engine_kwargs that are refused, and what sets them."""

PASSED = frozenset(
    {
        *("health_check_period_s", "health_check_timeout_s", "graceful_shutdown_wait_loop_s"),
        *("ray_actor_options", "logging_config", "max_replicas_per_node"),
        *("max_constructor_retry_count",),
    }
)
"""Options of Serve that its engines' deployment gets as they are."""

TAKEN = frozenset(
    {"num_replicas", "autoscaling_config", "max_queued_requests", "graceful_shutdown_timeout_s"}
)
WITHOUT_EFFECT = frozenset({"max_ongoing_requests", "request_router_config", "name"})
REFUSED = {
    "user_config": "it is for classes of a user's own",
    "placement_group_bundles": "placement_group_config is for that",
    "placement_group_strategy": "placement_group_config is for that",
}
REPLICAS = ("min_replicas", "max_replicas", "downscale_delay_s", "target_ongoing_requests")
"""Fields of an autoscaling_config that are settings of Rayfin's; Serve gets the others."""

RANKS = ("tensor_parallel_size", "pipeline_parallel_size")
NUMBERS = ("data_parallel_size", "min_engines", "max_engines")
MOST_REPLICAS = 100  # of num_replicas "auto", as Serve has it
ENGINE_CPUS = 0.0001  # of what watches an engine, Ray's least: none lies on a head without CPUs
LEFT_CPUS = 0.01  # that workers leave of a node's whole CPUs for those
STREAMING_FORMATS = ("runai_streamer", "runai_streamer_sharded")


@dataclass(slots=True)
class AppPlan:
    """An application: its doors, its models, and options of its ingress for Serve."""

    server: ServerArgs
    models: list[ModelArgs]
    ingress: dict[str, Any] = field(default_factory=dict)


def translate(args: LLMServingArgs) -> AppPlan:
    """Returns the application that a configuration of Ray's describes.

    Raises:
        InvalidConfig: a field that Rayfin cannot follow; the message has its path.
    """
    if not _is_default(args.ingress_cls_config):
        message = "ingress_cls_config: the ingress is Rayfin's own; middleware: adds to it"
        raise InvalidConfig(message, "ingress_cls_config")
    idle: list[str] = []
    ingress = _checked(args.ingress_deployment_config, "ingress_deployment_config")
    for name in ingress.keys() - DeploymentSchema.model_fields.keys():
        near = no_such_field(name, list(DeploymentSchema.model_fields))
        raise InvalidConfig(f"ingress_deployment_config.{near}", name)
    count = _ingress_replicas(args, ingress, idle)
    server = _server({"ingress_replicas": count} | (args.model_extra or {}))
    options = {"num_cpus": 0} | ingress.get("ray_actor_options", {})
    if variables := _variables(args.llm_configs):
        given = options.get("runtime_env") or {}
        options["runtime_env"] = _merged({"env_vars": variables}, given)
    ingress["ray_actor_options"] = options
    read = [_read(place, config, idle) for place, config in enumerate(args.llm_configs)]
    models = several_models(server, EngineArgs(), [each.settings for each in read], "llm_configs")
    if idle:
        logger.warning("without effect here: %s", ", ".join(dict.fromkeys(idle)))
    return AppPlan(
        server,
        [each.applied(model) for each, model in zip(read, models, strict=True)],
        ingress,
    )


@dataclass(slots=True)
class _Model:
    """What an LLMConfig says: settings, and what only Serve and the autoscaler get."""

    settings: dict[str, Any]
    options: dict[str, Any]
    autoscaling: dict[str, Any]
    target: float | None
    drain: float | None

    def add(self, engine: Mapping[str, Any]) -> None:
        """Adds the engine's settings; Serve's numbers count groups of ``data_parallel_size``."""
        ranks = engine.get("data_parallel_size")
        if isinstance(ranks, int):
            numbers = {name: self.settings[name] for name in NUMBERS if name in self.settings}
            engine = {**engine, **{name: ranks * count for name, count in numbers.items()}}
            if (first := self.autoscaling.get("initial_replicas")) is not None:
                self.autoscaling["initial_replicas"] = ranks * first
        self.settings |= engine

    def make_room(self) -> None:
        """Takes what watches engines off a stage's CPUs: nodes have whole ones."""
        place = self.settings.get("placement", {})
        cpus, ranks = place.get("cpus", 1.0), self.settings.get("tensor_parallel_size", 1)
        if self.options["ray_actor_options"]["num_cpus"] == ENGINE_CPUS and cpus >= 1:
            left = math.ceil(LEFT_CPUS / ENGINE_CPUS / ranks) * ENGINE_CPUS
            self.settings["placement"] = {**place, "cpus": round(cpus - left, 4)}

    def applied(self, model: ModelArgs) -> ModelArgs:
        server = model.server
        if self.drain is not None:
            server = replace(server, shutdown_timeout=self.drain)
        return replace(
            model,
            server=server,
            options=self.options,
            autoscaling=self.autoscaling,
            ongoing_requests=self.target,
        )


def _server(given: Mapping[str, Any]) -> ServerArgs:
    """Settings of the whole application, checked."""
    known = [field.name for field in fields(ServerArgs)]
    for name in sorted(given.keys() - set(known)):
        raise InvalidConfig(no_such_field(name, [*LLMServingArgs.model_fields, *known]), name)
    settings: dict[str, Any] = AppArgs.model_validate(given).model_dump(exclude_unset=True)
    return split_args(settings)[0]


def _read(place: int, config: LLMConfig, idle: list[str]) -> _Model:
    try:
        for name in ("server_cls", "callback_config"):
            if not _is_default(getattr(config, name)):
                message = f"{name}: Rayfin has its own classes; plugin: [route=...] is near"
                raise InvalidConfig(message, name)
        model = _scale(config.deployment_config, idle)
        model.add(_engine(config, idle))
        model.make_room()
        if config.runtime_env is not None:
            actor = model.options["ray_actor_options"]
            actor["runtime_env"] = _merged(actor.get("runtime_env") or {}, config.runtime_env)
    except InvalidConfig as error:
        where = f"llm_configs[{place}] ({config.model_id})"
        raise InvalidConfig(f"{where}: {error.message}", error.param) from error
    idle += [
        f"experimental_configs.{name}"
        for name in config.experimental_configs
        if name != "num_ingress_replicas"
    ]
    return model


def _engine(config: LLMConfig, idle: list[str]) -> dict[str, Any]:
    """The settings of a model and its engines, by Rayfin's names."""
    kwargs = dict(config.engine_kwargs)
    for name in kwargs.keys() & ELSEWHERE.keys():
        raise InvalidConfig(f"engine_kwargs.{name}: set {ELSEWHERE[name]} instead", name)
    if kwargs.get("load_format") in STREAMING_FORMATS:
        idle.append(f"load_format: {kwargs.pop('load_format')}")
    settings = read_engine_kwargs(kwargs)
    for name in (*RANKS, "data_parallel_size"):
        if not isinstance(settings.get(name, 1), int):
            wrong = f"engine_kwargs.{name} must be a whole number, got {settings[name]!r}"
            raise InvalidConfig(wrong, name)
    loading = config.model_loading_config
    source = loading.model_source
    if source is not None and not isinstance(source, str):
        if source.extra_files:
            raise InvalidConfig("model_source.extra_files: put them into the bucket", "extra_files")
        source = source.bucket_uri
    settings["model"] = _place(source or loading.model_id, "model_source")
    settings["served_model_name"] = loading.model_id
    if loading.tokenizer_source is not None:
        settings["tokenizer"] = loading.tokenizer_source
    if config.adapters is not None:
        settings = config.adapters.settings() | settings
        idle += config.adapters.without_effect()
    return settings | _hardware(config, settings)


def _place(source: str, name: str) -> str:
    if "://" in source and not is_bucket(source):
        raise InvalidConfig(f"{name} {source}: no such address is read; mount it as a folder", name)
    return source


def _hardware(config: LLMConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The device, and the resources of each worker."""
    kind, label = None, config.accelerator_type
    if (hardware := config.accelerator_config) is not None:
        kind = hardware.kind
    bundle: dict[str, float] | None = None
    strategy = "PACK"
    if (places := config.placement_group_config) is not None:
        workers = math.prod(settings.get(name, 1) for name in RANKS)
        bundle, strategy = _bundle(config, workers), places.strategy
        kind = kind or ("tpu" if bundle.get("TPU") else "gpu" if bundle.get("GPU") else "cpu")
        if strategy == "STRICT_SPREAD" and settings.get("tensor_parallel_size", 1) > 1:
            raise InvalidConfig(
                "placement_group_config.strategy: the ranks of a stage share a node", "strategy"
            )
    if kind == "tpu" or (label or "").startswith("TPU"):
        raise InvalidConfig("accelerator: Rayfin runs on GPUs and CPUs, not on TPUs", "kind")
    if kind == "cpu" and label is not None:
        raise InvalidConfig("accelerator_type does not go with CPUs alone", "accelerator_type")
    device = settings.get("device") or (
        {"gpu": "cuda", "cpu": "cpu"}[kind] if kind else "cuda" if label else "auto"
    )
    return {"device": device} | _placement(bundle, strategy, label, device, settings)


def _bundle(config: LLMConfig, workers: int) -> dict[str, float]:
    places = config.placement_group_config
    assert places is not None
    if places.bundle_per_worker is not None:
        return places.bundle_per_worker.model_dump()
    bundles = [bundle.model_dump() for bundle in places.bundles or ()]
    if len(bundles) != workers or any(bundle != bundles[0] for bundle in bundles):
        raise InvalidConfig(
            f"placement_group_config.bundles: {workers} equal ones are needed, one for each rank",
            "bundles",
        )
    return bundles[0]


def _placement(
    bundle: dict[str, float] | None,
    strategy: str,
    label: str | None,
    device: str,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The setting ``placement``, and threads; nothing where all is as usual."""
    placement: dict[str, Any] = {}
    threads: dict[str, Any] = {}
    if bundle is not None:
        rest = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        placement = {"cpus": bundle["CPU"], "strategy": strategy, "resources": rest}
        if device == "cuda":
            placement["gpus"] = bundle["GPU"] or 1.0
        elif bundle["CPU"] >= 1 and "threads" not in settings:
            threads["threads"] = int(bundle["CPU"])
    if label is not None:
        resources = {f"accelerator_type:{label}": 0.001} | placement.get("resources", {})
        placement["resources"] = resources
    return threads | ({"placement": placement} if placement else {})


def _scale(config: Mapping[str, Any], idle: list[str]) -> _Model:
    """What a ``deployment_config`` says."""
    config = _checked(config, "deployment_config")
    for name in config:
        if name in REFUSED:
            raise InvalidConfig(f"deployment_config.{name}: {REFUSED[name]}", name)
        if name not in PASSED | TAKEN | WITHOUT_EFFECT:
            known = [*PASSED, *TAKEN, *WITHOUT_EFFECT]
            raise InvalidConfig(f"deployment_config.{no_such_field(name, known)}", name)
    idle += [f"deployment_config.{name}" for name in config if name in WITHOUT_EFFECT]
    options = {name: config[name] for name in config if name in PASSED}
    options["ray_actor_options"] = {"num_cpus": ENGINE_CPUS} | options.get("ray_actor_options", {})
    drain = config.get("graceful_shutdown_timeout_s")
    model = _Model({}, options, {}, None, None if drain is None else float(drain))
    if (queue := config.get("max_queued_requests", -1)) != -1:
        model.settings["max_waiting_requests"] = queue
    scaling, replicas = config.get("autoscaling_config"), config.get("num_replicas")
    if replicas == "auto":
        scaling = {"min_replicas": 1, "max_replicas": MOST_REPLICAS} | (scaling or {})
    elif replicas is not None:
        model.settings["data_parallel_size"] = replicas
    if scaling is not None:
        _autoscaling(scaling, model)
    return model


def _autoscaling(scaling: Mapping[str, Any], model: _Model) -> None:
    """Adds what an ``autoscaling_config`` says."""
    for name in scaling:
        if "policy" in name:
            raise InvalidConfig(
                "autoscaling_config.policy: engines say themselves how many are wanted; "
                "target_ongoing_requests is one more target",
                "policy",
            )
        if name not in AutoscalingConfig.model_fields:
            near = no_such_field(name, list(AutoscalingConfig.model_fields))
            raise InvalidConfig(f"autoscaling_config.{near}", name)
    scaling = _checked(scaling, "autoscaling_config", AutoscalingConfig)
    least, limit = scaling.get("min_replicas", 1), scaling.get("max_replicas", 1)
    model.settings["data_parallel_size"] = max(1, least)
    if "downscale_delay_s" in scaling:
        model.settings["idle_timeout"] = scaling["downscale_delay_s"]
    model.target = scaling.get("target_ongoing_requests")
    if limit != least:
        model.settings |= {"min_engines": least, "max_engines": limit}
        model.autoscaling = {name: scaling[name] for name in scaling if name not in REPLICAS}


def _ingress_replicas(args: LLMServingArgs, ingress: dict[str, Any], idle: list[str]) -> int:
    """How many HTTP replicas there are; takes that from the ingress' options."""
    wanted = [
        config.experimental_configs.get("num_ingress_replicas") for config in args.llm_configs
    ]
    scaling = ingress.pop("autoscaling_config", None) or {}
    for name in ingress.keys() & {"name"}:
        idle.append(f"ingress_deployment_config.{name}: {ingress.pop(name)}")
    wanted += [scaling.get("min_replicas"), scaling.get("initial_replicas")]
    if (number := ingress.pop("num_replicas", None)) is not None and number != "auto":
        wanted.append(number)
    if scaling:
        idle.append("ingress_deployment_config.autoscaling_config but its min_replicas")
    return max(filter(None, wanted), default=1)


def _variables(configs: list[LLMConfig]) -> dict[str, str]:
    """The environment variables of all models, which their one ingress gets."""
    variables: dict[str, str] = {}
    for config in configs:
        for name, value in ((config.runtime_env or {}).get("env_vars") or {}).items():
            if variables.setdefault(name, value) != value:
                raise InvalidConfig(
                    f"runtime_env.env_vars: two models of one ingress set {name} differently",
                    "env_vars",
                )
    return variables


def _checked(
    given: Mapping[str, Any], path: str, kind: type[BaseModel] = DeploymentSchema
) -> dict[str, Any]:
    """The fields of a configuration of Serve's that say something, as plain values.

    Raises:
        InvalidConfig: a value that Serve would refuse.
    """
    plain = {
        name: value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        for name, value in given.items()
    }
    said = {name: value for name, value in plain.items() if value is not None}
    try:
        kind.model_validate({"name": path, **said} if kind is DeploymentSchema else said)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, (path, *first["loc"])))
        raise InvalidConfig(f"{place}: {first['msg']}", path) from error
    return said


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """One runtime_env of two: the second one's fields, and the variables of both."""
    variables = {**(first.get("env_vars") or {}), **(second.get("env_vars") or {})}
    return {**first, **second} | ({"env_vars": variables} if variables else {})


def _is_default(value: Any) -> bool:
    """Whether a configuration is missing, or none of its fields says anything."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_defaults=True)
    return value is None or (isinstance(value, dict) and not any(value.values()))
