"""vLLM's flags and ``--config`` of ``rayfin serve``: what they set, and what they say."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from rayfin.actors.config import EngineArgs
from rayfin.deployments.cli.main import cli, main
from rayfin.deployments.cli.vllm_options import rewrite
from rayfin.deployments.serve.server_args import ServerArgs

OVERRIDES = {"a": {"b": 1, "c_d": "x"}}
Calls = list[tuple[ServerArgs, EngineArgs, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What was served."""
    import rayfin.deployments.serve as package

    made: Calls = []

    def serve(server: ServerArgs, engine: EngineArgs, **more: Any) -> int:
        made.append((server, engine, more))
        return 0

    module = ModuleType("rayfin.deployments.serve.serving")
    module.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(package, "serving", module, raising=False)
    monkeypatch.setattr("rayfin.deployments.serve.ports.require_ports", lambda *_: None)
    return made


@pytest.mark.parametrize(
    ("line", "setting", "value"),
    [
        ("--max-num-seqs 32", "max_decoding_batch", 32),
        ("--max_num_seqs=32", "max_decoding_batch", 32),
        ("--max-num-batched-tokens 2k", "max_batch_tokens", 2000),
        ("--gpu-memory-utilization 0.8", "memory_utilization", 0.8),
        ("--device-memory-utilization 0.8", "memory_utilization", 0.8),
        ("--block-size 32", "page_size", 32),
        ("--no-enable-prefix-caching", "prefix_caching", False),
        ("--no-prefix-caching --enable-prefix-caching", "prefix_caching", True),
        ("--enable-chunked-prefill", "scheduler", "v1"),
        ("--no-enable-chunked-prefill", "scheduler", "v0"),
        ("--async-scheduling --no-async-scheduling", "steps_in_flight", 1),
        ("--num-gpu-blocks-override 100", "num_pages", 100),
        ("--api-server-count 3", "ingress_replicas", 3),
        ("-asc 3", "ingress_replicas", 3),
        ("-tp 2", "tensor_parallel_size", 2),
        ("-dp 2", "data_parallel_size", 2),
        ("--tokenizer-revision v2", "tokenizer_revision", "v2"),
        ("--download-dir /models", "download_dir", "/models"),
        ("-q int8", "quantization", "int8"),
        ("--scheduling-policy priority", "policy", "priority"),
        ("--kv-cache-memory-bytes 1.5G", "kv_cache_memory", 3 * 2**29),
        ("--uvicorn-log-level error", "log_level", "warning"),
        ("--log-level INFO", "log_level", "info"),
        ("--max-model-len 8K", "max_model_len", 8192),
        ("--max-model-len auto", "max_model_len", None),
        ("--max-model-len -1", "max_model_len", None),
        ("--dtype half", "dtype", "float16"),
        ("--load-format safetensors", "load_format", "auto"),
        ("--attention-backend TRITON_ATTN", "attention", "triton"),
        ("--tool-strict-level parameter", "tool_guidance", "schema"),
        ("--max-num-queued-reqs 9", "max_waiting_requests", 9),
        ("--disable-fastapi-docs", "enable_docs", False),
        ('--hf-overrides {"a":{"b":1}} --hf-overrides.a.c_d=x', "hf_overrides", OVERRIDES),
        ("--hf_overrides.a.b 1 --hf-overrides.a.c_d x", "hf_overrides", OVERRIDES),
        ("--override-generation-config.top_k 5", "override_generation_config", {"top_k": 5}),
        ("--chat-template-content-format openai", "chat_template_content_format", "openai"),
        ("--no-disable-fastapi-docs", "enable_docs", True),
        ("--served-model-name a b --port 81", "served_model_name", ["a", "b"]),
        ("--api-key a b c", "api_key", ["a", "b", "c"]),
        ('--allowed-origins ["*"]', "allowed_origins", ['["*"]']),
        ("--max-num-seqs 4 --max-decoding-batch 5", "max_decoding_batch", 5),
        ("-sc.method ngram", "spec_method", "ngram"),
        ("--speculative-config.num_speculative_tokens 3 --spec-method ngram", "spec_tokens", 3),
        ('--speculative-config {"method":"ngram"}', "speculative_config", '{"method":"ngram"}'),
        ("--max-decoding-batch 5 --max-num-seqs 4", "max_decoding_batch", 4),
    ],
)
def test_an_alias_sets_its_setting(calls: Calls, line: str, setting: str, value: Any) -> None:
    assert main(["serve", "org/name", *line.split()]) == 0
    server, engine, _ = calls[0]
    assert engine.model == "org/name"
    assert getattr(server if hasattr(server, setting) else engine, setting) == value


def test_the_model_may_stand_behind_a_list(calls: Calls) -> None:
    assert main(["serve", "--served-model-name", "me", "here", "--port", "81"]) == 0
    assert calls[0][0].served_model_name == ["me"] and calls[0][1].model == "here"


def test_both_names_are_in_the_help() -> None:
    text = CliRunner().invoke(cli, ["serve", "--help"]).output
    assert "--max-decoding-batch, --max-num-seqs INTEGER" in text
    assert "--enable-prefix-caching" in text and "--fully-sharded-loras" not in text
    assert CliRunner().invoke(cli, ["serve", "--help=all"]).output == text
    assert "--max-num-seqs" not in CliRunner().invoke(cli, ["generate", "--help"]).output


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--disable-log-requests", ["--disable-log-requests"]),
        ("--disable-log-stats -O3", ["--disable-log-stats", "--optimization-level"]),
        ("-cc.mode 3", ["--compilation-config"]),
        ('--compilation-config {"mode":3}', ["--compilation-config"]),
        ("--cudagraph-capture-sizes 1 2 4", ["--cudagraph-capture-sizes"]),
        ("--disable-frontend-multiprocessing", ["--disable-frontend-multiprocessing"]),
        ("--no-enable-lora --cpu-offload-gb 0", []),
    ],
)
def test_what_is_not_needed_is_a_line_of_the_log(
    calls: Calls, capsys: pytest.CaptureFixture[str], line: str, names: list[str]
) -> None:
    assert main(["serve", "org/name", *line.split()]) == 0
    server, engine, _ = calls[0]
    assert (server, engine) == (ServerArgs(), EngineArgs(model="org/name"))
    lines = capsys.readouterr().err.splitlines()
    assert [words.partition(" has no effect: ")[0] for words in lines] == [
        f"rayfin: {name}" for name in names
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--fully-sharded-loras",
            "--fully-sharded-loras is not supported: Rayfin has no such LoRA adapters",
        ),
        (
            "--lora-target-modules a b",
            "--lora-target-modules is not supported: Rayfin has no choice of layers; an adapter's "
            "own count",
        ),
        ("--runner embed", "Invalid value for '--runner'"),
        ("-sc.method eagle3", "--speculative-config method 'eagle3' needs a model"),
        ("--speculative-config {}x", "--speculative-config is not JSON"),
        ("--ec-transfer-config {}", "--ec-transfer-config is not supported"),
        ("--kv-transfer-config.kv_role kv_both", "--kv-transfer-config needs kv_connector"),
        ("--quantization awq", "Invalid value for '--quantization'"),
        ("--max-model-len 1.5", "Invalid value for '--max-model-len'"),
        ("--max-model-len 1.0005k", "is not a whole number"),
        ("--hf-overrides [1]", "'[1]' is not a JSON object"),
        ("--hf-overrides {", "'{' is not JSON"),
        ("--generation-config nowhere", "must be 'auto', 'vllm', 'none' or a folder"),
        ("--max-num-seqs 0", "--max-decoding-batch must be at least 1, got 0"),
        ("--num-gpu-blocks-override 0", "--num-pages must be at least 1, got 0"),
    ],
)
def test_what_is_missing_is_one_line_and_status_2(
    calls: Calls, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert main(["serve", "org/name", *line.split()]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not calls


def test_words_of_the_command_line() -> None:
    assert rewrite(["--a_b=c_d", "--help=all", "--", "--a_b"]) == [
        *("--a-b=c_d", "--help", "--", "--a_b")
    ]
    assert rewrite(["--api-key", "a", "b"]) == ["--api-key", "a", "b"]  # b is MODEL
    assert rewrite(["m", "--api-key", "a", "b"]) == ["m", "--api-key", "a", "--api-key", "b"]


FILE = """
model: from/file
port: 9000
max_num_seqs: 8
enable-prefix-caching: false
disable_fastapi_docs: false
served_model_name: [a, b]
enforce_eager: true
api_key: secret
seed: null
compilation_config: {mode: 3}
disable-log-requests: true
headless: false
"""


def test_a_file_of_flags(calls: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (file := tmp_path / "file.yaml").write_text(FILE)
    assert main(["serve", "--config", str(file)]) == 0
    server, engine, more = calls[0]
    assert server == ServerArgs(served_model_name=["a", "b"], api_key=["secret"], enable_docs=True)
    assert engine == EngineArgs(
        model="from/file", max_decoding_batch=8, prefix_caching=False, enforce_eager=True
    )
    assert more["port"] == 9000
    assert capsys.readouterr().err.count("has no effect") == 2


def test_the_token_of_hugging_face_is_for_all_processes(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "stored")
    assert main(["serve", "m", "--hf-token"]) == 0 and os.environ["HF_TOKEN"] == "stored"
    assert main(["serve", "m", "--hf-token", "other"]) == 0 and os.environ["HF_TOKEN"] == "other"
    assert "other" not in repr(calls)


def test_the_command_line_wins(calls: Calls, tmp_path: Path) -> None:
    (file := tmp_path / "file.yaml").write_text(FILE)
    line = "--max-decoding-batch 5 --served-model-name c --prefix-caching --port 81"
    assert main(["serve", "other", f"--config={file}", *line.split()]) == 0
    server, engine, more = calls[0]
    assert server.served_model_name == ["c"] and more["port"] == 81
    assert (engine.model, engine.max_decoding_batch, engine.prefix_caching) == ("other", 5, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 8\nfoo: 1\nport: 80", "has unknown flags: 'max_num_seq', 'foo'"),
        ("max_num_seqs: 8\nmax-decoding-batch: 4", "sets max_num_seqs and max-decoding-batch"),
        ("enforce_eager: 3", "must be true or false, got 3"),
        (
            "fully_sharded_loras: true",
            "--fully-sharded-loras is not supported: Rayfin has no such LoRA adapters",
        ),
        ("port: x", "Invalid value for '--port'"),
        ("[1, 2]", "must hold flags by name"),
        ("a: [", "cannot be read"),
    ],
)
def test_mistakes_of_a_file(
    calls: Calls, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    (file := tmp_path / "file.yaml").write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1 and not calls


@pytest.mark.parametrize(
    ("variables", "key"),
    [
        ({"VLLM_API_KEY": "theirs"}, ["theirs"]),
        ({"VLLM_API_KEY": "theirs", "RAYFIN_API_KEY": "ours"}, ["ours"]),
    ],
)
def test_the_key_of_the_environment(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], key: list[str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["serve"]) == 0
    assert calls[0][0].api_key == key
