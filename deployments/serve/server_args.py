"""Settings of a server beside those of its engines."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.scheduler.subscriptions import MAX_CLIENTS
from rayfin.actors.timing import SSE_COMMENT_SECONDS
from rayfin.deployments.adapters.flags import AdapterFlags, read_modules
from rayfin.deployments.batches.folder import FolderLimits
from rayfin.deployments.generation.limits import MAX_PROMPTS
from rayfin.deployments.guidance.schema.lint import MAX_BYTES
from rayfin.deployments.http.body_limits import MAX_BODY_BYTES
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.media.settings import MediaSettings, media_sources, read_limits
from rayfin.deployments.serve.preflight import check_generation_config
from rayfin.deployments.text.parsing.format import ReasoningField, ToolGuidance
from rayfin.deployments.text.parsing.formats import check_parsers

KEY_VARIABLES = ("RAYFIN_API_KEY", "VLLM_API_KEY")
ADMIN_KEY_VARIABLES = ("RAYFIN_ADMIN_API_KEY",)
RETENTION = re.compile(r"([1-9][0-9]{0,4})([hd])")
ContentFormat = Literal["auto", "string", "openai"]
MAX_INGRESSES = MAX_CLIENTS // 2  # an update has twice as many for a while


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


def _model_flag(default: Any, help: str) -> Any:
    """A setting that each model of an application may have for itself."""
    return field(default=default, metadata={"help": help, "of_model": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """The doors' settings: one field per flag."""

    served_model_name: str | list[str] | None = _model_flag(
        None,
        "model name in the API; may be repeated, responses carry the first; default: the model's",
    )
    api_key: str | list[str] | None = _flag(
        None,
        "clients must send one of these keys as a bearer token; may be repeated or "
        "separated by commas",
    )
    api_key_file: str | None = _flag(None, "file with one key, or name:key, per line")
    admin_api_key: str | list[str] | None = _flag(
        None, "API key for /admin/*; the routes are disabled if unset"
    )
    admin_port: int | None = _flag(
        None, "serve /admin/* on this port of the head node instead of beside the API"
    )
    admin_host: str = _flag("127.0.0.1", "host of --admin-port; 0.0.0.0 is every interface")
    allowed_origins: list[str] | None = _flag(None, "origins for CORS; may be repeated")
    allowed_methods: list[str] | None = _flag(None, "methods for CORS; default: all")
    allowed_headers: list[str] | None = _flag(None, "headers for CORS; default: all")
    allow_credentials: bool = _flag(False, "allow credentials for CORS")
    root_path: str | None = _flag(
        None, "path under which a proxy in front offers the API, whether it removes it or not"
    )
    middleware: list[str] | None = _flag(
        None,
        "ASGI middleware around the API, as module.Class or module.function (request, call_next); "
        "may be repeated, the last is the outermost",
    )
    enable_tokenizer_info_endpoint: bool = _flag(
        False, "serve /tokenizer_info, with the chat template and the tokenizer's settings"
    )
    enable_log_requests: bool = _flag(
        False, "log the sampling parameters of each request; at --log-level debug its prompt too"
    )
    enable_log_outputs: bool = _flag(
        False,
        "with --enable-log-requests: log the text and the finish reason of each answer; at "
        "--log-level debug its token ids too",
    )
    max_log_len: int | None = _flag(
        None,
        "maximum number of characters or ids of a prompt or answer in the log; default: no limit",
    )
    log_error_stack: bool = _flag(
        False,
        "log each request that is refused before its answer begins, with the stack trace of its "
        "error",
    )
    sse_keep_alive_interval: float = _flag(
        SSE_COMMENT_SECONDS,
        "seconds without an event after which a stream sends a comment, so that proxies keep its "
        "connection; 0: never",
    )
    enable_docs: bool = _flag(False, "serve the API's documentation at /docs")
    ui: bool = _flag(True, "serve a page with a chat and the state of the engines at /ui")
    max_body_bytes: int = _flag(
        MAX_BODY_BYTES,
        "maximum size of a request body in bytes; images and audio in requests may need more",
    )
    limit_mm_per_prompt: dict[str, Any] | None = _model_flag(
        None, 'JSON object of the most media of a prompt; default: {"image": 8, "audio": 8}'
    )
    allowed_media_domains: list[str] | None = _flag(
        None,
        "hosts that media are fetched from; may be repeated; default: all public ones",
    )
    no_media_urls: bool = _flag(False, "fetch no media: requests bring them as data: addresses")
    allowed_local_media_path: str | None = _flag(
        None, "folder of files that requests may name as file: addresses; default: none"
    )
    max_image_pixels: int = _flag(33_000_000, "maximum number of pixels of an image")
    max_audio_seconds: float = _flag(120.0, "maximum length of a clip of audio in seconds")
    audio_chunk_seconds: float | None = _flag(
        None,
        "length of the clips that /v1/audio/transcriptions and translations cut a recording into, "
        "at most --max-audio-seconds; default: what the model's encoder hears at once, mostly 30",
    )
    max_audio_upload_seconds: float = _flag(
        3600.0, "maximum length of a recording of these routes in seconds"
    )
    max_audio_upload_bytes: int = _flag(25 * 2**20, "maximum size of such a recording in bytes")
    max_media_bytes: int = _flag(20 * 2**20, "maximum size of an image or clip in bytes")
    media_timeout: float = _flag(5.0, "seconds to fetch an image or clip")
    mm_processor_cache_gb: float = _flag(
        1.0, "memory of an HTTP replica for media that were processed last, in GiB"
    )
    max_grammar_bytes: int = _flag(
        MAX_BYTES,
        "maximum size of the schema or grammar that a request's answer must follow, in bytes",
    )
    max_prompts: int = _flag(MAX_PROMPTS, "maximum number of prompts in a completion request")
    return_tokens_as_token_ids: bool = _flag(
        False, "log probabilities name tokens token_id:ID, unless a request says otherwise"
    )
    enable_force_include_usage: bool = _flag(
        False, "include usage in every chunk of every stream, whatever the request says"
    )
    enable_prompt_tokens_details: bool = _flag(
        True, "include prompt_tokens_details, with the cached tokens, in usage"
    )
    enable_per_request_metrics: bool = _flag(
        False,
        "include metrics, the times of the request, in answers; in streams, in the usage chunk",
    )
    trust_request_chat_template: bool = _flag(
        False, "requests may bring a chat_template; only for clients that are trusted"
    )
    drop_images: bool = _flag(
        False, "images for a model that reads none become a line of text, and are not refused"
    )
    chat_template: str | None = _model_flag(None, "Jinja chat template, or a file with one")
    chat_template_content_format: ContentFormat = _model_flag(
        "auto",
        "content of messages for the chat template: string, openai (a list of parts), or auto: "
        "what the template takes",
    )
    default_chat_template_kwargs: dict[str, Any] | None = _model_flag(
        None, "JSON object of variables for the chat template; requests may set others"
    )
    response_role: str = _flag("assistant", "role of the answers of chat completions")
    generation_config: str = _model_flag(
        "auto",
        "auto: use the model's default sampling parameters; vllm or none: ignore them; or a "
        "folder with a generation_config.json",
    )
    override_generation_config: dict[str, Any] | None = _model_flag(
        None, "JSON object of default sampling parameters, over --generation-config"
    )
    tool_call_parser: str = _model_flag(
        "auto",
        "how the model writes tool calls: auto finds it from the chat template; none: tool calls "
        "are text; or a name, such as hermes",
    )
    reasoning_parser: str = _model_flag(
        "auto",
        "how the model writes its reasoning: auto, none, or a name, such as qwen3",
    )
    enable_auto_tool_choice: bool = _model_flag(
        False, "accepted for vLLM's sake; tool_choice auto is always on"
    )
    tool_guidance: ToolGuidance = _model_flag(
        "json",
        "arguments of tool calls with tool_choice auto: schema: they follow the tool's schema; "
        "json: they are a JSON object; off: they are as the model writes them",
    )
    exclude_tools_when_tool_choice_none: bool = _flag(
        False, "the chat template sees no tools if tool_choice is none"
    )
    reasoning_field: ReasoningField = _model_flag(
        "both", "field of chat messages that has the model's reasoning"
    )
    lora_modules: list[str] | None = _model_flag(
        None,
        'LoRA adapter as name=path or JSON {"name": ..., "path": ...}; may be repeated; path is a '
        "folder that peft has written, or its name on Hugging Face",
    )
    lora_dir: str | None = _model_flag(
        None,
        "folder of LoRA adapters, or s3://...: a request's model NAME is looked for as its "
        "subfolder NAME",
    )
    shutdown_timeout: float = _flag(
        30.0, "seconds that running requests have to finish at shutdown"
    )
    tenant_token_rate: int | None = _flag(
        None, "maximum number of prompt and output tokens per minute for each key's tenant"
    )
    priority_tenants: list[str] | None = _flag(
        None, "tenants whose requests may set a priority; may be repeated; default: all"
    )
    metrics_alias: Literal["vllm"] | None = _flag(None, "export the metrics under vLLM's names too")
    metrics_port: int | None = _flag(
        None,
        "serve the metrics on this port of the head node too, without a key and on every interface",
    )
    ingress_replicas: int = _flag(
        1, "number of HTTP replicas, which tokenize and stream; at most 32"
    )
    data_parallel_size: int = _model_flag(
        1, "number of engines, each with its own copy of the model"
    )
    min_engines: int | None = _model_flag(
        None,
        "minimum number of engines with --max-engines; 0 stops all without requests; "
        "default: --data-parallel-size",
    )
    max_engines: int | None = _model_flag(
        None,
        "maximum number of engines; starts and stops engines with the load; default: a "
        "fixed number",
    )
    prefill_engines: int = _model_flag(
        0,
        "number of further engines that compute long prompts for the others, where the streams of "
        "those would wait for longer than reading the pages takes",
    )
    max_prefill_engines: int | None = _model_flag(
        None,
        "maximum number of them; starts and stops them with the load; default: a fixed number",
    )
    idle_timeout: float = _model_flag(
        300.0,
        "with --max-engines or --max-prefill-engines: seconds of low load before an engine stops; "
        "for the last one (--min-engines 0), seconds without a request",
    )
    cold_start_timeout: float = _model_flag(
        300.0, "with --min-engines 0: seconds that a request waits for an engine to start"
    )
    batch_dir: str | None = _flag(
        None,
        "folder for /v1/files and /v1/batches, which all nodes share; the routes are off if unset",
    )
    response_dir: str | None = _flag(
        None,
        "folder in which stored responses and conversations outlive their process; on the node of "
        "the ingress, or shared; they are in memory if unset",
    )
    batch_retention: str = _flag("30d", "how long files and ended batches are kept: 12h, 30d")
    batch_concurrency: int | None = _flag(
        None, "requests of batches in flight; default: twice --max-decoding-batch, of all engines"
    )
    batch_scale: bool = _model_flag(
        False, "with --max-engines: lines of batches start engines too, not only other requests"
    )
    max_file_bytes: int = _flag(200 * 2**20, "maximum size of an uploaded file in bytes")
    otlp_traces_endpoint: str | None = _flag(
        None, "URL of an OTLP collector for traces of requests"
    )
    engine_timeout: float = _model_flag(
        25.0, "seconds that a new request waits if there is no engine"
    )
    replay_timeout: float = _model_flag(
        120.0, "seconds that an open stream waits for another engine after its own is lost"
    )

    def __post_init__(self) -> None:
        check_generation_config(self.generation_config)
        for name in ("override_generation_config", "default_chat_template_kwargs"):
            if not isinstance(getattr(self, name), dict | None):
                raise InvalidConfig(f"{name} must be an object", name)
        self._check_edge()
        if not self.response_role:
            raise InvalidConfig("response_role must not be empty", "response_role")
        lists = ("allowed_origins", "allowed_methods", "allowed_headers", "priority_tenants")
        for name in lists:
            words(getattr(self, name), name)
        if isinstance(self.served_model_name, list) and not self.served_model_name:
            raise InvalidConfig("served_model_name must not be empty", "served_model_name")
        self.api_keys()
        self.admin_keys()
        self.adapter_flags().check()
        for name in ("max_body_bytes", "max_grammar_bytes", "max_prompts"):
            if (value := getattr(self, name)) < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}", name)
        if self.tenant_token_rate is not None and self.tenant_token_rate < 1:
            raise InvalidConfig(
                f"tenant_token_rate must be at least 1, got {self.tenant_token_rate}",
                "tenant_token_rate",
            )
        if self.metrics_alias not in (None, "vllm"):
            raise InvalidConfig(
                f"metrics_alias must be 'vllm', got {self.metrics_alias!r}", "metrics_alias"
            )
        for name in ("metrics_port", "admin_port"):
            if (value := getattr(self, name)) is not None and not 0 < value < 65536:
                raise InvalidConfig(f"{name} must be in [1, 65535], got {value}", name)
        if self.admin_port is not None and self.admin_port == self.metrics_port:
            raise InvalidConfig("admin_port must not be metrics_port", "admin_port")
        for name in ("ingress_replicas", "data_parallel_size"):
            if (value := getattr(self, name)) < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}", name)
        if (value := self.ingress_replicas) > MAX_INGRESSES:
            limit = f"at most {MAX_INGRESSES}, got {value}"
            raise InvalidConfig(f"ingress_replicas must be {limit}", "ingress_replicas")
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        for name, kind in (
            ("tool_guidance", ToolGuidance),
            ("reasoning_field", ReasoningField),
            ("chat_template_content_format", ContentFormat),
        ):
            if (value := getattr(self, name)) not in get_args(kind):
                known = ", ".join(map(repr, get_args(kind)))
                raise InvalidConfig(f"{name} must be one of {known}, got {value!r}", name)
        self._check_engines()
        self.batch_limits()
        for name in (
            *("shutdown_timeout", "engine_timeout", "replay_timeout"),
            *("idle_timeout", "cold_start_timeout", "sse_keep_alive_interval"),
        ):
            if (value := getattr(self, name)) < 0:
                raise InvalidConfig(f"{name} must not be negative, got {value}", name)
        if self.chat_template is not None and "{" not in self.chat_template:
            if not Path(self.chat_template).is_file():
                raise InvalidConfig(f"there is no file {self.chat_template}", "chat_template")

    def adapter_flags(self) -> AdapterFlags:
        """Returns where adapters come from.

        Raises:
            InvalidConfig: a value that names none.
        """
        return AdapterFlags(read_modules(self.lora_modules), self.lora_dir)

    def _check_edge(self) -> None:
        if self.enable_log_outputs and not self.enable_log_requests:
            raise InvalidConfig(
                "enable_log_outputs needs enable_log_requests", "enable_log_outputs"
            )
        self.media_settings()
        root, longest = self.root_path, self.max_log_len
        if root and (not root.startswith("/") or root.endswith("/")):
            raise InvalidConfig(
                f"root_path must begin with / and not end with it, got {root!r}", "root_path"
            )
        if longest is not None and longest < 0:
            raise InvalidConfig(f"max_log_len must be at least 0, got {longest}", "max_log_len")

    def media_settings(self) -> MediaSettings:
        """Where images and clips come from, and how large they may be.

        Raises:
            InvalidConfig: a limit that is none, or a folder that does not exist.
        """
        limits = (*("max_image_pixels", "max_audio_seconds", "max_media_bytes", "media_timeout"),)
        for name in (*limits, "max_audio_upload_seconds", "max_audio_upload_bytes"):
            if not (value := getattr(self, name)) > 0:
                raise InvalidConfig(f"{name} must be over 0, got {value}", name)
        chunk = self.audio_chunk_seconds
        if chunk is not None and not chunk >= 1:
            name = "audio_chunk_seconds"
            raise InvalidConfig(f"{name} must be at least 1, got {chunk}", name)
        if self.mm_processor_cache_gb < 0:
            name = "mm_processor_cache_gb"
            raise InvalidConfig(f"{name} must not be negative", name)
        hosts = words(self.allowed_media_domains, "allowed_media_domains")
        folder, domains = media_sources(self.allowed_local_media_path, hosts)
        return MediaSettings(
            max_images=read_limits(self.limit_mm_per_prompt),
            max_audios=read_limits(self.limit_mm_per_prompt, "audio"),
            max_seconds=self.max_audio_seconds,
            chunk_seconds=chunk,
            max_upload_seconds=self.max_audio_upload_seconds,
            max_upload_bytes=self.max_audio_upload_bytes,
            max_pixels=self.max_image_pixels,
            max_bytes=self.max_media_bytes,
            timeout=self.media_timeout,
            urls=not self.no_media_urls,
            domains=domains,
            folder=folder,
            cache_bytes=int(self.mm_processor_cache_gb * 2**30),
        )

    def _check_engines(self) -> None:
        least = self.data_parallel_size if self.min_engines is None else self.min_engines
        if self.min_engines is not None and self.max_engines is None:
            raise InvalidConfig("min_engines needs max_engines", "min_engines")
        if least < 0:
            raise InvalidConfig(f"min_engines must not be negative, got {least}", "min_engines")
        if self.max_engines is not None and self.max_engines < max(1, least):
            raise InvalidConfig(
                f"max_engines must be at least {max(1, least)}, got {self.max_engines}",
                "max_engines",
            )
        prefill, limit = self.prefill_engines, self.max_prefill_engines
        if prefill < 0:
            raise InvalidConfig(
                f"prefill_engines must not be negative, got {prefill}", "prefill_engines"
            )
        if limit is not None and limit < max(1, prefill):
            name = "max_prefill_engines"
            raise InvalidConfig(f"{name} must be at least {max(1, prefill)}, got {limit}", name)
        if limit is not None and not prefill:
            name = "max_prefill_engines"
            raise InvalidConfig(f"{name} needs prefill_engines", name)

    def batch_limits(self) -> FolderLimits:
        """What tenants may store for batches.

        Raises:
            InvalidConfig: a limit under 1, or a retention of another form.
        """
        for name in ("max_file_bytes", "batch_concurrency"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InvalidConfig(f"{name} must be at least 1, got {value}", name)
        match = RETENTION.fullmatch(self.batch_retention)
        if match is None:
            raise InvalidConfig(
                f"batch_retention must look like 12h or 30d, got {self.batch_retention!r}",
                "batch_retention",
            )
        seconds = int(match[1]) * (3600.0 if match[2] == "h" else 86400.0)
        return FolderLimits(self.max_file_bytes, retention=seconds)

    def api_keys(self) -> ApiKeys | None:
        """The keys that clients may use, by their digests; None lets everybody in.

        Raises:
            InvalidConfig: a malformed key, or a file that cannot be read or holds none.
        """
        given = [self.api_key] if isinstance(self.api_key, str) else self.api_key
        return ApiKeys.load(given or (), self.api_key_file)

    def admin_keys(self) -> ApiKeys | None:
        """The keys of operators, by their digests; None: there are no routes for them.

        Raises:
            InvalidConfig: a malformed key, or one that clients have as well.
        """
        given = [self.admin_api_key] if isinstance(self.admin_api_key, str) else self.admin_api_key
        keys, clients = ApiKeys.load(given or (), param="admin_api_key"), self.api_keys()
        if keys and clients and not keys.digests.isdisjoint(clients.digests):
            raise InvalidConfig("admin_api_key must not be an API key as well", "admin_api_key")
        return keys


def words(values: list[str] | None, name: str) -> tuple[str, ...]:
    """The words of a list flag; one that is written as a JSON list, as for vLLM, is read as such.

    Raises:
        InvalidConfig: it starts like a JSON list of strings, and is none.
    """
    words: list[str] = []
    for value in values or ():
        listed: Any = [value]
        if value.startswith("["):
            try:
                listed = json.loads(value)
            except ValueError:
                listed = None
        if not isinstance(listed, list) or not all(isinstance(word, str) for word in listed):
            raise InvalidConfig(f"{name} must be a JSON list of strings, got {value!r}", name)
        words += listed
    return tuple(words)


def key_of_environment(variables: Iterable[str] = KEY_VARIABLES) -> str | None:
    """The keys that the environment names, where no setting does: a secret is no flag."""
    return next(filter(None, map(os.environ.get, variables)), None)


class _AppArgs(BaseModel):
    """Typed arguments of ``build_app``: the fields of ServerArgs and of EngineArgs, and models."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


def _fields_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: (hints[f.name], f.default) for f in fields(kind)}


OF_MODEL = frozenset(f.name for f in fields(ServerArgs) if "of_model" in f.metadata)

ModelSettings: type[_AppArgs] = create_model(
    "ModelSettings",
    __base__=_AppArgs,
    **{name: field for name, field in _fields_of(ServerArgs).items() if name in OF_MODEL},
    **_fields_of(EngineArgs),
)
"""One of several models: what is its own; the rest is as for all."""

_MODELS: Any = (list[ModelSettings] | None, None)  # type: ignore[valid-type]

AppArgs: type[_AppArgs] = create_model(
    "AppArgs",
    __base__=_AppArgs,
    **_fields_of(ServerArgs),
    **_fields_of(EngineArgs),
    models=_MODELS,
)


def split_args(values: dict[str, Any]) -> tuple[ServerArgs, EngineArgs]:
    """Flat settings, taken apart; those of several ``models`` are left out.

    Raises:
        InvalidConfig: a name or value that is none.
    """
    of_server = {f.name for f in fields(ServerArgs)}
    values = {name: value for name, value in values.items() if name != "models"}
    server = ServerArgs(**{name: value for name, value in values.items() if name in of_server})
    return server, EngineArgs.from_dict({n: v for n, v in values.items() if n not in of_server})
