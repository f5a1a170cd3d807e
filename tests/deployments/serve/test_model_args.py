"""Several models' settings: from a Serve config, from files, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app as serve_build
from ray.serve.schema import ServeDeploySchema

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.app import build_app
from rayfin.deployments.serve.model_args import ModelArgs, read_models, several_models
from rayfin.deployments.serve.server_args import AppArgs, ServerArgs

ROOT = Path(__file__).parents[3]
TWO: list[dict[str, Any]] = [
    {"model": "org/small", "max_model_len": 512, "max_engines": 3},
    {"model": "demo", "served_model_name": ["large", "org/large"], "generation_config": "none"},
]


def made(settings: list[dict[str, Any]]) -> list[ModelArgs]:
    server = ServerArgs(served_model_name="no model's", engine_timeout=7.0)
    return several_models(server, EngineArgs(threads=2, max_model_len=256), settings)


def test_own_settings_over_those_of_all() -> None:
    small, large = made(TWO)
    assert small.engine == EngineArgs(model="org/small", threads=2, max_model_len=512)
    assert large.engine == EngineArgs(threads=2, max_model_len=256)
    assert small.names == ["org/small"] and large.names == ["large", "org/large"]
    assert [own.server.max_engines for own in (small, large)] == [3, None]
    assert [own.server.engine_timeout for own in (small, large)] == [7.0, 7.0]
    assert large.server.generation_config == "none"
    assert [own.deployment for own in (small, large)] == ["engine-org-small", "engine-large"]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ([], "empty"),
        ([{"max_model_len": 8}], "must name its model"),
        ([{"model": "a", "api_key": "secret"}], "api_key"),
        ([{"model": "a", "max_model_len": "long"}], "max_model_len"),
        ([{"model": "a", "max_model_len": 0}], r"models\[0\]: max_model_len must be at least 1"),
        ([{"model": "a"}, {"model": "a"}], "the same name"),
        ([{"model": "a"}, {"model": "b", "served_model_name": ["c", "a"]}], "the same name"),
        ([{"model": "a/b"}, {"model": "a-b"}], "but for signs"),
    ],
)
def test_what_is_refused(settings: list[dict[str, Any]], word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        made(settings)


def test_a_serve_config_binds_engines_for_each() -> None:
    args: Any = AppArgs
    app = build_app(args(models=TWO, threads=1, api_key="secret"))
    server, models, _, engines, *_ = app._bound_deployment.init_args
    deployments = [own._bound_deployment for own in engines]
    assert [own.name for own in deployments] == ["engine-org-small", "engine-large"]
    assert [own.init_args[0].threads for own in deployments] == [1, 1]
    assert deployments[0]._deployment_config.autoscaling_config.max_replicas == 3
    assert deployments[1]._deployment_config.num_replicas == 1
    assert [own.names[0] for own in models] == ["org/small", "large"]
    assert "secret" not in repr((server, models))
    (alone,) = build_app(args())._bound_deployment.init_args[3]
    assert alone._bound_deployment.name == "engine"


def test_files(tmp_path: Path) -> None:
    one, more = tmp_path / "one.yaml", tmp_path / "more.yaml"
    one.write_text("model: org/small\nmax_model_len: 512\n")
    more.write_text("[{model: b}, {model: c, served_model_name: [d]}]")
    read = read_models(ServerArgs(), EngineArgs(), [str(one), str(more)])
    assert [own.names for own in read] == [["org/small"], ["b"], ["d"]]
    for text in ("", "only words", "{", "- 7"):
        one.write_text(text)
        with pytest.raises(InvalidConfig, match="one.yaml"):
            read_models(ServerArgs(), EngineArgs(), [str(one)])


def test_the_example_is_bound_as_serve_binds_it() -> None:
    """Serve's own walk finds the engines inside the ingress' arguments."""
    config = yaml.safe_load((ROOT / "examples" / "serve_models.yaml").read_text())
    (application,) = ServeDeploySchema.model_validate(config).applications
    args: Any = AppArgs
    built = serve_build(build_app(args(**application.args)), name="zoo")
    names = {deployment.name for deployment in built.deployments}
    assert names == {"ingress", "engine-demo", "engine-helper"}


def test_a_folder_of_adapters_is_looked_for_at_the_start_alone(tmp_path: Path) -> None:
    """Ingresses may be on nodes that have none, and it may be away for a while."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    model = ModelArgs(ServerArgs(lora_dir=str(folder)), EngineArgs())
    folder.rmdir()
    assert model.adapters is not None and model.adapters.root == str(folder)
    with pytest.raises(InvalidConfig, match="there is no folder"):
        ServerArgs(lora_dir=str(folder))
