"""The models of an application, each with its own settings."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.adapters.flags import AdapterFlags
from rayfin.deployments.client.engine_names import ENGINE
from rayfin.deployments.serve.preflight import DEMO
from rayfin.deployments.serve.server_args import OF_MODEL, ModelSettings, ServerArgs, words
from rayfin.deployments.vllm.settings import BY_NAME, engine_settings

SECRETS = ("api_key", "api_key_file", "admin_api_key")


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """One model: how it is served, its engines' settings, and the Serve deployment of these."""

    server: ServerArgs
    engine: EngineArgs
    deployment: str = ENGINE
    from_zero: bool = False  # its engines are started when they are asked for
    options: Mapping[str, Any] = field(default_factory=dict)  # of Serve, for its engines
    autoscaling: Mapping[str, Any] = field(default_factory=dict)  # the same, of their number
    ongoing_requests: float | None = None  # of an engine, over which another one is wanted

    def __post_init__(self) -> None:
        if self.server.adapter_flags().any and not self.engine.enable_lora:
            object.__setattr__(self, "engine", replace(self.engine, enable_lora=True))
        if self.server.prefill_engines:  # pages that are free cannot be read
            kept = replace(self.engine, disable_hybrid_kv_cache_manager=True)
            object.__setattr__(self, "engine", kept)
        if self.server.prefill_engines and not self.engine.kv_peers:
            raise InvalidConfig(
                "prefill_engines needs kv_peers: other engines read what they have computed",
                "prefill_engines",
            )

    @property
    def deployments(self) -> list[str]:
        """The Serve deployments of its engines; the second is of those that only prefill."""
        names = [self.deployment, f"{self.deployment}-prefill"]
        return names if self.server.prefill_engines else names[:1]

    @property
    def adapters(self) -> AdapterFlags | None:
        """Where its adapters come from; None if it serves none."""
        if not self.engine.serves_adapters:
            return None
        return replace(self.server.adapter_flags(), max_rank=self.engine.max_lora_rank)

    def shown(self) -> dict[str, Any]:
        """All settings by name, without keys."""
        whole = asdict(self.server) | asdict(self.engine)
        return {name: value for name, value in whole.items() if name not in SECRETS}

    @property
    def names(self) -> list[str]:
        """What clients call it; the first name is the one in answers."""
        given = self.server.served_model_name
        if given is None:
            return [self.engine.model]
        return [given] if isinstance(given, str) else list(words(given, "served_model_name"))


def several_models(
    server: ServerArgs,
    engine: EngineArgs,
    settings: Sequence[Mapping[str, Any]],
    path: str = "models",
) -> list[ModelArgs]:
    """One for each of ``settings``, which say what differs from ``server`` and ``engine``.

    Args:
        path: of the settings, for errors.

    Raises:
        InvalidConfig: a setting that is none of a model's, or names that are not different.
    """
    models: list[ModelArgs] = []
    for place, given in enumerate(settings):
        param = f"{path}[{place}]"
        checked = _checked(given, param)
        if "model" not in checked:
            raise InvalidConfig(f"{param} must name its model", param)
        doors = {"served_model_name": None} | {n: v for n, v in checked.items() if n in OF_MODEL}
        inner = {name: value for name, value in checked.items() if name not in OF_MODEL}
        try:
            model = ModelArgs(replace(server, **doors), replace(engine, **inner))
        except InvalidConfig as error:
            raise InvalidConfig(f"{param}: {error.message}", error.param) from error
        models.append(replace(model, deployment=f"{ENGINE}-{_word(model.names[0])}"))
    _check_apart(models)
    return models


def read_engine_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A model's settings by Rayfin's names, of those by vLLM's names or Rayfin's.

    Raises:
        InvalidConfig: Rayfin lacks what one asks for, nothing has a name, or two are one.
    """
    known = ModelSettings.model_fields
    settings = engine_settings(kwargs, known)
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *BY_NAME], 1)
            hint = f"; near it is {near[0]}" if near else ""
            raise InvalidConfig(f"there is no setting {name}{hint}", name)
    return settings


def one_model(kwargs: Mapping[str, Any]) -> ModelArgs:
    """The only model of a program, of settings as :func:`read_engine_kwargs` takes them.

    Raises:
        InvalidConfig: a setting that is none, or a value that is none.
    """
    settings = {"model": DEMO} | read_engine_kwargs(kwargs)
    (model,) = several_models(ServerArgs(), EngineArgs(), [settings])
    return ModelArgs(model.server, model.engine)


def read_models(server: ServerArgs, engine: EngineArgs, files: Sequence[str]) -> list[ModelArgs]:
    """As :func:`several_models`, of YAML files; each holds a model's settings, or a list of such.

    Raises:
        InvalidConfig: a file that holds none.
    """
    settings: list[Mapping[str, Any]] = []
    for file in files:
        try:
            held = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InvalidConfig(f"{file} cannot be read: {error}", "model_config") from error
        models = held if isinstance(held, list) else [held]
        if not all(isinstance(model, dict) for model in models):
            raise InvalidConfig(f"{file} holds no settings of a model", "model_config")
        settings += models
    return several_models(server, engine, settings)


def _checked(given: Mapping[str, Any], param: str) -> dict[str, Any]:
    """The settings that are given, of the right types."""
    try:
        return ModelSettings.model_validate(dict(given)).model_dump(exclude_unset=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise InvalidConfig(f"{param}: {name}: {first['msg']}", name) from error


def _word(name: str) -> str:
    """A model's name as part of a deployment's and of actors' names."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")


def _check_apart(models: Sequence[ModelArgs]) -> None:
    if not models:
        raise InvalidConfig("models must not be empty", "models")
    names = [name for model in models for name in model.names]
    deployments = [name for model in models for name in model.deployments]
    for kind, values in (("name", names), ("name, but for signs,", deployments)):
        for value in values:
            if values.count(value) > 1:
                raise InvalidConfig(
                    f"two models have the same {kind} ({value}): give one a served_model_name",
                    "served_model_name",
                )
