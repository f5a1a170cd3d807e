"""The flat settings of a server and its engine."""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.serve.server_args import AppArgs, ServerArgs, split_args

EXAMPLE = Path(__file__).parents[3] / "examples" / "serve_config.yaml"


def test_every_setting_has_one_home_and_help() -> None:
    server = {f.name for f in fields(ServerArgs)}
    engine = {f.name for f in fields(EngineArgs)}
    assert not server & engine
    assert set(AppArgs.model_fields) == server | engine | {"models"}
    for field in (*fields(ServerArgs), *fields(EngineArgs)):
        assert field.metadata["help"], field.name


def test_defaults_survive_the_round_trip() -> None:
    assert split_args(AppArgs().model_dump()) == (ServerArgs(), EngineArgs())


def test_settings_go_where_they_belong() -> None:
    server, engine = split_args({"api_key": "k", "page_size": 32})
    assert asdict(server) == {**asdict(ServerArgs()), "api_key": "k"}
    assert asdict(engine) == {**asdict(EngineArgs()), "page_size": 32}


@pytest.mark.parametrize(
    "args",
    [{"max_modle_len": 5}, {"dtype": "float8"}, {"page_size": "many"}, {"scheduler": None}],
)
def test_typed_arguments_refuse_what_is_none(args: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        AppArgs(**args)
    assert next(iter(args)) in str(error.value)


@pytest.mark.parametrize(
    "args",
    [
        {"page_size": 0},
        {"ingress_replicas": 33},
        {"max_grammar_bytes": 0},
        {"tool_call_parser": "hermès"},
        {"reasoning_parser": "hermes"},
    ],
)
def test_values_are_checked_too(args: dict[str, Any]) -> None:
    (name,) = args
    with pytest.raises(InvalidConfig, match=f"{name} must be") as error:
        split_args(AppArgs(**args).model_dump())
    assert error.value.param == name


@pytest.mark.parametrize("name", ["tool_guidance", "reasoning_field"])
def test_words_of_parsers_are_checked(name: str) -> None:
    with pytest.raises(InvalidConfig, match=f"{name} must be one of"):
        ServerArgs(**{name: "some"})


def test_names_of_vllm_set_the_parsers() -> None:
    args = ServerArgs(
        tool_call_parser="qwen3_xml", reasoning_parser="qwen3", enable_auto_tool_choice=True
    )
    assert (args.tool_call_parser, args.reasoning_parser) == ("qwen3_xml", "qwen3")


def test_example_file_is_valid() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(EXAMPLE.read_text()))
    (application,) = config.applications
    server, engine = split_args(AppArgs(**application.args).model_dump())
    assert (server, engine.model) == (ServerArgs(), "demo")
