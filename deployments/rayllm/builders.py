"""Applications of ``ray.serve.llm``'s configurations."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel
from ray.serve import Application

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.app import bind_models, with_keys
from rayfin.deployments.rayllm.config import LLMConfig, LLMServingArgs
from rayfin.deployments.rayllm.translate import translate


def build_openai_app(llm_serving_args: Any) -> Application:
    """Builds the application of some models: what ``import_path`` names.

    Args:
        llm_serving_args: an ``LLMServingArgs``, of Ray's class or of Rayfin's, or its dict.

    Raises:
        ValueError: a field that is none, or that Rayfin cannot follow; the message has its path.
    """
    given = llm_serving_args
    if isinstance(given, BaseModel) and not isinstance(given, LLMServingArgs):
        given = given.model_dump(exclude_unset=True)
    args = LLMServingArgs.model_validate(given)
    try:
        plan = translate(args)
        with _environment(plan.ingress["ray_actor_options"].get("runtime_env", {})):
            return bind_models(with_keys(plan.server), EngineArgs(), plan.models, plan.ingress)
    except InvalidConfig as error:
        raise ValueError(error.message) from error


def build_llm_deployment(
    llm_config: Any,
    *,
    name_prefix: str | None = None,
    bind_kwargs: Mapping[str, Any] | None = None,
    override_serve_options: Mapping[str, Any] | None = None,
    deployment_cls: object = None,
) -> Application:
    """Builds the application of one model, whose handle has Ray's methods: chat, completions, ...

    It has Rayfin's HTTP routes as well.

    Args:
        name_prefix, bind_kwargs: without effect.
        override_serve_options: over the model's ``deployment_config``.

    Raises:
        ValueError: as :func:`build_openai_app`, or a ``deployment_cls`` is given.
    """
    if deployment_cls is not None:
        raise ValueError("deployment_cls: Rayfin runs no classes of a user's own")
    config = LLMConfig.model_validate(
        llm_config.model_dump(exclude_unset=True)
        if isinstance(llm_config, BaseModel)
        else llm_config
    )
    options = {**config.deployment_config, **(override_serve_options or {})}
    return build_openai_app(
        {"llm_configs": [config.model_copy(update={"deployment_config": options})]}
    )


def build_dp_openai_app(dp_serving_args: Any) -> Application:
    """Builds the application of one model with several engines, of Ray's ``llm_config``.

    Raises:
        ValueError: as :func:`build_openai_app`.
    """
    given = dp_serving_args
    args = given.model_dump(exclude_unset=True) if isinstance(given, BaseModel) else dict(given)
    config = args.pop("llm_config", None)
    return build_openai_app(args | {"llm_configs": [] if config is None else [config]})


build_dp_deployment = build_llm_deployment


@contextmanager
def _environment(runtime_env: Mapping[str, Any]) -> Iterator[None]:
    """Sets a model's variables while it is looked at here: a token of Hugging Face, say."""
    variables = runtime_env.get("env_vars") or {}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
