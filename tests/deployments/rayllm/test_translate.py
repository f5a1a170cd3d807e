"""``rayfin.llm`` without Ray: samples of Ray's documentation, and every field that there is."""

import ast
import logging
import math
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ValidationError
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import build

from rayfin import llm
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.supervision.placement import bundles
from rayfin.deployments.rayllm import translate as module
from rayfin.deployments.rayllm.config import LLMConfig, LLMServingArgs
from rayfin.deployments.rayllm.translate import AppPlan, translate
from rayfin.deployments.serve.model_args import ModelArgs, read_engine_kwargs
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.vllm.table import VLLM_FLAGS, Lacks

ROOT = Path(__file__).resolve().parents[3]
SAMPLES = {
    sample["name"]: sample
    for sample in yaml.safe_load(Path(__file__).with_name("samples.yaml").read_text())
}
DEMO = {"model_loading_config": {"model_id": "demo"}}


@pytest.fixture
def samples(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The arguments of each sample, with the files that they name."""
    key = tmp_path / "keys"
    key.write_text("key-of-the-file\n")
    text = yaml.safe_dump({name: sample["args"] for name, sample in SAMPLES.items()})
    text = text.replace("LORA_FOLDER", str(tmp_path)).replace("KEY_FILE", str(key))
    args: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return args


def plan(args: Any) -> AppPlan:
    return translate(LLMServingArgs.model_validate(args))


def one(**fields: Any) -> AppPlan:
    return plan({"llm_configs": [DEMO | fields]})


def refusal(**fields: Any) -> str:
    with pytest.raises((InvalidConfig, ValidationError)) as refused:
        one(**fields)
    return str(refused.value)


def on_hub(args: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with models that are here."""
    for config in args["llm_configs"]:
        config["model_loading_config"]["model_source"] = "demo"
    return args


@pytest.mark.parametrize("name", SAMPLES)
def test_each_sample_becomes_an_application(samples: dict[str, dict[str, Any]], name: str) -> None:
    application = llm.build_openai_app(on_hub(samples[name]))
    assert isinstance(application, Application)
    pickle.dumps(plan(samples[name]))


def asked(model: ModelArgs) -> list[dict[str, float]]:
    """The bundles of an engine, each of which leaves a hundredth for what watches engines."""
    whole = []
    for each in bundles(model.engine):
        cpus = math.ceil(each.get("CPU", 0))
        if cpus and model.options["ray_actor_options"]["num_cpus"] == 0.0001:
            assert cpus - each["CPU"] == pytest.approx(0.01)
        whole.append({**each, "CPU": cpus} if cpus else each)
    return whole


def test_samples_mean_what_they_mean_to_ray(samples: dict[str, dict[str, Any]]) -> None:
    plans = {name: plan(args) for name, args in samples.items()}
    first, second = plans["quickstart"].models
    assert (first.names, first.engine.model) == (["qwen-0.5b"], "Qwen/Qwen2.5-0.5B-Instruct")
    assert (first.deployment, second.deployment) == ("engine-qwen-0.5b", "engine-qwen-1.5b")
    assert (first.server.min_engines, first.server.max_engines) == (1, 2)
    assert asked(first) == [{"CPU": 1, "GPU": 1, "accelerator_type:A10G": 0.001}]
    (model,) = plans["kuberay"].models
    assert (model.engine.device, model.engine.memory_utilization) == ("auto", 0.75)
    assert (model.ongoing_requests, model.server.max_engines) == (64, 4)
    (model,) = plans["adapters"].models
    assert (model.engine.max_loras, model.adapters is not None) == (16, True)
    (model,) = plans["tensor-parallel"].models
    stage = {"CPU": 4, "GPU": 4, "accelerator_type:H100": 0.004}
    assert asked(model) == [stage, stage]
    (model,) = plans["bundles"].models
    assert asked(model) == [{"CPU": 4, "GPU": 2}]
    assert model.engine.place.strategy == "STRICT_PACK"
    (model,) = plans["fraction"].models
    assert asked(model) == [{"GPU": 0.49}]
    (model,) = plans["cpus"].models
    assert (model.engine.device, model.engine.threads) == ("cpu", 4)
    assert asked(model) == [{"CPU": 4}]
    assert bundles(model.engine) == [{"CPU": 3.99}]
    (model,) = plans["tools"].models
    assert (model.server.tool_call_parser, model.server.reasoning_parser) == (
        "hermes",
        "deepseek_r1",
    )
    assert plans["tools"].server.ingress_replicas == 3
    (model,) = plans["gated"].models
    variables = {"HF_TOKEN": "hf-1", "VLLM_API_KEY": "key-of-the-configuration"}
    assert model.options["health_check_period_s"] == 10
    actor = {"num_cpus": 2, "runtime_env": {"env_vars": variables}}
    assert model.options["ray_actor_options"] == actor
    assert plans["gated"].ingress["ray_actor_options"]["runtime_env"] == {"env_vars": variables}
    assert plans["gated"].ingress["max_ongoing_requests"] == 1000
    assert plans["gated"].server.ingress_replicas == 4
    assert (model.server.data_parallel_size, model.server.shutdown_timeout) == (2, 60)
    assert (model.engine.max_waiting_requests, model.server.max_engines) == (500, None)
    (model,) = plans["zero"].models
    assert (model.server.min_engines, model.server.idle_timeout) == (0, 90)
    assert model.autoscaling == {"initial_replicas": 1, "upscale_delay_s": 5}
    assert plans["zero"].server.api_keys() is not None
    assert plans["zero"].server.middleware == ["own.Layer"]


def test_keys_of_a_runtime_env_are_keys_of_the_api(samples: dict[str, dict[str, Any]]) -> None:
    application = llm.build_openai_app(on_hub(samples["gated"]))
    edge = application._bound_deployment.init_args[2]
    expected = ServerArgs(api_key="key-of-the-configuration").api_keys()
    assert expected is not None
    assert edge.keys.digests == expected.digests
    assert "key-of-the-configuration" not in repr(edge)


def test_serve_builds_its_configuration(tmp_path: Path) -> None:
    """``serve build``, with options of Serve's that no configuration of its own could hold."""
    (tmp_path / "own_app.py").write_text(
        "from rayfin.llm import build_openai_app\n"
        'loading = {"model_id": "demo"}\n'
        'scaling = {"min_replicas": 0, "max_replicas": 2}\n'
        'model = {"model_loading_config": loading, "deployment_config": {"autoscaling_config": '
        "scaling}}\n"
        'app = build_openai_app({"llm_configs": [model]})\n'
    )
    file = tmp_path / "serve.yaml"
    build.callback(("own_app:app",), str(tmp_path), str(file), [], False)
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text())).applications
    assert {own.name for own in application.deployments} == {"ingress", "engine-demo"}


def test_a_changed_model_leaves_the_others_deployment_as_it_is(
    samples: dict[str, dict[str, Any]],
) -> None:
    before = llm.build_openai_app(on_hub(samples["quickstart"]))
    samples["quickstart"]["llm_configs"][1]["engine_kwargs"] = {"max_num_seqs": 8}
    after = llm.build_openai_app(samples["quickstart"])
    kept, changed = (
        [app._bound_deployment.init_args[3][place]._bound_deployment for app in (before, after)]
        for place in (0, 1)
    )
    assert kept[0].init_args == kept[1].init_args
    assert kept[0]._deployment_config == kept[1]._deployment_config
    assert changed[0].init_args != changed[1].init_args


def test_objects_of_rays_and_files_are_taken(tmp_path: Path) -> None:
    class ForeignLoading(BaseModel):
        model_id: str = "other"
        model_source: str | None = None

    class Foreign(BaseModel):
        model_loading_config: ForeignLoading = ForeignLoading()
        engine_kwargs: dict[str, Any] = {}

    loading = ForeignLoading(model_id="one", model_source="demo")
    file = tmp_path / "model.yaml"
    file.write_text("model_loading_config: {model_id: two, model_source: demo}\n")
    configs = [Foreign(model_loading_config=loading), str(file), LLMConfig.from_file(str(file))]
    models = plan({"llm_configs": configs[:2]}).models
    assert [model.names for model in models] == [["one"], ["two"]]
    assert isinstance(llm.build_llm_deployment(configs[0]), Application)
    assert isinstance(llm.build_openai_app({"llm_configs": configs[1:2]}), Application)
    assert isinstance(llm.build_dp_openai_app({"llm_config": configs[2]}), Application)


def test_variables_of_an_actor_stay_beside_those_of_its_model() -> None:
    def env(name: str) -> dict[str, Any]:
        return {"runtime_env": {"env_vars": {name: "yes"}, "pip": [name]}}

    config = DEMO | env("MODEL") | {"deployment_config": {"ray_actor_options": env("ACTOR")}}
    ingress = {"ray_actor_options": env("INGRESS"), "autoscaling_config": None}
    app = plan({"llm_configs": [config], "ingress_deployment_config": ingress})
    actor = app.models[0].options["ray_actor_options"]["runtime_env"]
    assert actor == {"env_vars": {"ACTOR": "yes", "MODEL": "yes"}, "pip": ["MODEL"]}
    door = app.ingress["ray_actor_options"]["runtime_env"]
    assert door == {"env_vars": {"MODEL": "yes", "INGRESS": "yes"}, "pip": ["INGRESS"]}


def test_replicas_are_groups_of_engines() -> None:
    kwargs = {"data_parallel_size": 2}
    (model,) = one(engine_kwargs=kwargs, deployment_config={"num_replicas": 3}).models
    assert model.server.data_parallel_size == 6
    scaling = {"min_replicas": 1, "initial_replicas": 2, "max_replicas": 4, "upscale_delay_s": None}
    config = {"deployment_config": {"autoscaling_config": scaling}, "engine_kwargs": kwargs}
    (model,) = one(**config).models
    assert (model.server.min_engines, model.server.max_engines) == (2, 8)
    assert model.autoscaling == {"initial_replicas": 4}
    assert one(engine_kwargs=kwargs).models[0].server.data_parallel_size == 2


def test_buckets_are_sources() -> None:
    sources = ("s3://bucket/model", {"bucket_uri": "gs://bucket/model"})
    for source in sources:
        loading = {"model_id": "own", "model_source": source}
        (model,) = one(model_loading_config=loading).models
        assert model.engine.model.endswith("://bucket/model")
    (model,) = one(lora_config={"dynamic_lora_loading_path": "s3://bucket/adapters/"}).models
    assert model.server.lora_dir == "s3://bucket/adapters"


def test_ids_with_colons_and_slashes() -> None:
    (model,) = plan(
        {
            "llm_configs": [
                {"model_loading_config": {"model_id": "my/suffix:id", "model_source": "demo"}}
            ]
        }
    ).models
    assert (model.names, model.deployment) == (["my/suffix:id"], "engine-my-suffix-id")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engine_kwargs": {"max_num_seq": 3}}, "near it is max_num_seqs"),
        ({"engine_kwargs": {"model": "x"}}, "model_loading_config.model_source"),
        ({"engine_kwargs": {"port": 80}}, "http_options"),
        ({"engine_kwargs": {"kv_transfer_config": {"kv_connector": "Nixl"}}}, "kv_role must be"),
        ({"engine_kwargs": {"max_model_len": "many"}}, "max_model_len"),
        ({"llm_engine": "SGLang"}, "llm_engine must be 'vLLM'"),
        ({"accelerator_config": {"kind": "tpu"}}, "not on TPUs"),
        ({"accelerator_type": "TPU-V6E"}, "not on TPUs"),
        ({"accelerator_type": "L4", "accelerator_config": {"kind": "cpu"}}, "CPUs alone"),
        ({"placement_group_config": {"bundles": [{"GPU": 1}] * 2}}, "1 equal ones"),
        ({"placement_group_config": {"strategy": "PACK"}}, "either bundle_per_worker or bundles"),
        ({"deployment_config": {"user_config": {}}}, "a user's own"),
        ({"deployment_config": {"num_replica": 2}}, "near it is num_replicas"),
        (
            {"deployment_config": {"num_replicas": 2, "autoscaling_config": {}}},
            "num_replicas is not allowed when autoscaling_config",
        ),
        ({"deployment_config": {"ray_actor_options": [1]}}, "deployment_config.ray_actor_options"),
        (
            {"deployment_config": {"autoscaling_config": {"max_replicas": "a"}}},
            "autoscaling_config.max_replicas",
        ),
        ({"deployment_config": {"graceful_shutdown_timeout_s": "x"}}, "graceful_shutdown"),
        ({"runtime_env": {"env_vars": ["A"]}}, "env_vars must be an object of strings"),
        ({"runtime_env": {"env_vars": {"A": 1}}}, "env_vars must be an object of strings"),
        ({"deployment_config": {"autoscaling_config": {"policy": "x:y"}}}, "one more target"),
        ({"deployment_config": {"autoscaling_config": {"max_replica": 2}}}, "max_replicas"),
        ({"server_cls": "x:y"}, "plugin: [route=...] is near"),
        ({"callback_config": {"callback_class": "x:y"}}, "callback_config: Rayfin has its own"),
        ({"unknown": 1}, "unknown: there is no such field"),
        ({"acelerator_type": "L4"}, "near it is accelerator_type"),
        ({"engine_kwargs": {"tensor_parallel_size": "two"}}, "must be a whole number, got 'two'"),
        ({"lora_config": {"dynamic_lora_loading_path": "/nowhere/at/all"}}, "no folder"),
        ({"lora_config": {"dynamic_lora_loading_path": "ftp://b/f"}}, "mount it"),
        ({"model_loading_config": {"model_id": "a", "model_source": "ftp://b"}}, "mount it"),
        ({"model_loading_config": {"model_id": ""}}, "model_id"),
        ({"model_loading_config": {"model_source": "demo"}}, "model_id"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_its_name(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(**fields)


def test_bad_applications_are_values_that_are_wrong(tmp_path: Path) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "llm_configs"),
        ({"llm_configs": []}, "llm_configs"),
        ({"llm_configs": [DEMO, DEMO]}, "two models have the model_id 'demo'"),
        ({"llm_configs": [str(tmp_path / "none.yaml")]}, "there is no file"),
        ({"llm_configs": [DEMO], "api_key_fil": "x"}, "near it is api_key_file"),
        (
            {"llm_configs": [DEMO], "ingress_deployment_config": {"num_replica": 2}},
            "near it is num_replicas",
        ),
        ({"llm_configs": [DEMO], "ingress_cls_config": {"ingress_cls": "x:y"}}, "Rayfin's own"),
        (
            {
                "llm_configs": [
                    {
                        "model_loading_config": {"model_id": name},
                        "runtime_env": {"env_vars": {"A": name}},
                    }
                    for name in ("a", "b")
                ]
            },
            "set A differently",
        ),
    ]
    for args, said in bad:
        with pytest.raises(ValueError, match=said):
            llm.build_openai_app(args)
    second = {"model_loading_config": {"model_id": "b"}, "engine_kwargs": {"seeds": 1}}
    with pytest.raises(ValueError, match=r"llm_configs\[1\] \(b\): there is no setting seeds"):
        llm.build_openai_app({"llm_configs": [DEMO, second]})


def test_names_without_effect_are_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=module.logger.name):
        one(
            engine_kwargs={"load_format": "runai_streamer"},
            deployment_config={"max_ongoing_requests": 5, "name": "x"},
            experimental_configs={"stream_batching_interval_ms": 50},
            lora_config={"max_download_tries": 9},
        )
    (record,) = [own for own in caplog.records if own.name == module.logger.name]
    names = ("runai_streamer", "max_ongoing_requests", "name", "stream_batching_interval_ms")
    for name in (*names, "max_download_tries"):
        assert name in record.getMessage()


def fields_of_rays(path: str, name: str) -> set[str]:
    """The public fields of a class in Ray's sources, which cannot be imported without vLLM."""
    spec = find_spec("ray")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "llm" / "_internal" / path).read_text())
    (found,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name
    ]
    targets = [node.target for node in found.body if isinstance(node, ast.AnnAssign)]
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("serve/core/configs/llm_config.py", "LLMConfig"),
        ("serve/core/configs/llm_config.py", "ModelLoadingConfig"),
        ("serve/core/configs/llm_config.py", "LoraConfig"),
        ("serve/core/ingress/builder.py", "LLMServingArgs"),
        ("common/utils/cloud_utils.py", "CloudMirrorConfig"),
    ],
)
def test_classes_have_rays_fields_and_the_page_names_them(path: str, name: str) -> None:
    from rayfin.deployments.rayllm import config

    ours = getattr(config, name).model_fields.keys()
    assert fields_of_rays(path, name) == set(ours)
    page = (ROOT / "docs" / "from-ray.md").read_text()
    assert [field for field in ours if f"`{field}`" not in page] == []


def test_every_name_of_vllms_is_known_as_an_engine_kwarg() -> None:
    for flag in VLLM_FLAGS:
        name = flag.names[0].removeprefix("--").replace("-", "_")
        if isinstance(flag.outcome, Lacks):
            with pytest.raises(InvalidConfig, match="Rayfin has no"):
                read_engine_kwargs({name: "x-y-z"})
        else:
            assert "there is no setting" not in str(read_engine_kwargs({name: None}))


def test_names_that_are_missing_say_what_works() -> None:
    for name in ("LLMServer", "OpenAiIngress", "build_pd_openai_app"):
        with pytest.raises(ImportError, match=f"no {name}: "):
            getattr(llm, name)
    from rayfin.llm import openai_api_models

    assert openai_api_models.ChatCompletionRequest(model="x", messages=[]).model == "x"
