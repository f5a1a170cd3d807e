"""vLLM's flags of ``serve`` (0.32, and some of earlier versions), and what ``rayfin serve`` does.

A name is written without its dashes, its short form behind a comma, and what follows it as a mark:
``?`` nothing, with a ``--no-`` form; ``!`` nothing, without one; ``*`` several values; ``=`` JSON,
whose keys may also be written as ``--flag.key value``; no mark, a value.
``python tests/deployments/cli/test_from_vllm.py --write`` writes docs/from-vllm.md anew.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

Form = Literal["value", "switch", "once", "several", "config"]
FORMS: dict[str, Form] = {"?": "switch", "!": "once", "*": "several", "=": "config"}
NOT_NEEDED = "has no effect: Rayfin does without it"


@dataclass(frozen=True, slots=True)
class Alias:
    """A setting of Rayfin's has the same meaning.

    Attributes:
        setting: the field or option.
        words: vLLM's values by their names here; other values stay.
        sizes: whether the value may be written as 8k, 8K, 1.5M.
        nothing: values that stand for the default.
    """

    setting: str
    words: Mapping[str, str] = field(default_factory=dict)
    sizes: bool = False
    nothing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A switch that stands for a setting with a value: ``on``, and ``off`` for its other form."""

    on: str
    off: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """Rayfin does not need the flag."""


@dataclass(frozen=True, slots=True)
class Lacks:
    """Rayfin lacks what the flag asks for.

    Attributes:
        missing: completes "Rayfin has no ...".
        but: values that ask for nothing that is missing, and are accepted.
    """

    missing: str
    but: tuple[str, ...] = ()


Outcome = Alias | Rewritten | Accepted | Lacks


@dataclass(frozen=True, slots=True)
class VllmFlag:
    """One flag of vLLM's; the long one of its names is the first."""

    names: tuple[str, ...]
    outcome: Outcome
    form: Form


SAME = """
allow-credentials? allowed-headers allowed-local-media-path allowed-media-domains* allowed-methods
allowed-origins api-key* chat-template chat-template-content-format config convert
data-parallel-size,-dp default-chat-template-kwargs= download-dir dtype enable-auto-tool-choice?
enable-force-include-usage? enable-log-outputs? enable-log-requests? enable-lora?
enable-per-request-metrics? enable-prompt-embeds? enable-prompt-tokens-details?
enable-ssl-refresh? enable-tokenizer-info-endpoint? enforce-eager?
exclude-tools-when-tool-choice-none? generation-config hf-overrides= hf-token host kv-cache-dtype
kv-events-config= kv-offloading-size kv-transfer-config=
language-model-only? limit-mm-per-prompt= load-format log-error-stack? log-level logprobs-mode
long-prefill-token-threshold lora-dtype lora-modules* max-cpu-loras max-log-len max-logprobs
max-lora-rank max-loras max-model-len middleware mm-processor-cache-gb mm-processor-kwargs= model
otlp-traces-endpoint override-generation-config= pipeline-parallel-size,-pp pooler-config= port
quantization,-q reasoning-parser response-role return-tokens-as-token-ids? revision root-path
runner seed served-model-name* shutdown-timeout spec-method spec-model spec-tokens
speculative-config,-sc= sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-certfile
ssl-ciphers ssl-keyfile swap-space tensor-parallel-size,-tp tokenizer tokenizer-revision
tool-call-parser trust-remote-code? trust-request-chat-template? uds
"""
"""Flags whose names are Rayfin's too."""

ALIASES = {
    "api-server-count,-asc": "ingress_replicas",
    "uvicorn-log-level": "log_level",
    "tool-strict-level": "tool_guidance",
    "max-num-seqs": "max_decoding_batch",
    "max-num-batched-tokens": "max_batch_tokens",
    "max-num-queued-reqs": "max_waiting_requests",
    "max-num-queued-tokens": "max_waiting_tokens",
    "scheduling-policy": "policy",
    "block-size": "page_size",
    "gpu-memory-utilization,--device-memory-utilization": "memory_utilization",
    "kv-cache-memory-bytes": "kv_cache_memory",
    "num-gpu-blocks-override": "num_pages",
    "enable-prefix-caching?": "prefix_caching",
    "disable-hybrid-kv-cache-manager?": "disable_hybrid_kv_cache_manager",
    "attention-backend": "attention",
    "num-scheduler-steps": "max_lease",
    "preemption-mode": "preemption",
}
WORDS = {
    "log_level": {
        **{"trace": "debug", "notset": "debug"},
        **dict.fromkeys(("warn", "error", "critical"), "warning"),
    },
    "tool_guidance": {"auto": "json", "function": "json", "parameter": "schema"},
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "attention": {
        **{"TRITON_ATTN": "triton", "CPU_ATTN": "cpu", "TORCH_SDPA": "torch"},
        **dict.fromkeys(("FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION"), "auto"),
    },
}
"""vLLM's values of a setting that have other names here."""

SIZES = ("max_model_len", "max_batch_tokens", "max_waiting_tokens", "kv_cache_memory")
NOTHING = {"max_model_len": ("-1", "auto")}
REWRITTEN = {
    "disable-fastapi-docs?": Rewritten("--no-enable-docs", "--enable-docs"),
    "enable-chunked-prefill?": Rewritten("--scheduler=v1", "--scheduler=v0"),
    "async-scheduling?": Rewritten("--steps-in-flight=2", "--steps-in-flight=1"),
    "disable-async-output-proc!": Rewritten("--steps-in-flight=1"),
}
ACCEPTED = """
aggregate-engine-logging! all2all-backend attention-config,-ac= cohere-format
cohere-is-reasoning-model? compilation-config,-cc= cpu-distributed-timeout-seconds
cudagraph-capture-sizes* data-parallel-address,-dpa data-parallel-backend,-dpb
data-parallel-rpc-port,-dpp dbo-decode-token-threshold dbo-prefill-token-threshold
dcp-comm-backend dcp-q-replicate? disable-access-log-for-endpoints disable-cascade-attn?
disable-chunked-mm-input? disable-custom-all-reduce? disable-frontend-multiprocessing!
disable-log-requests! disable-log-stats!
disable-nccl-for-dp-synchronization? disable-uvicorn-access-log? distributed-timeout-seconds
dp-sync-interval ec-manager-config= enable-batch-sharded-sampling? enable-cumem-allocator?
enable-fault-tolerance? enable-flash-late-interaction? enable-flashinfer-autotune?
enable-log-deltas? enable-mamba-shared-prefix-checkpoint? enable-nccl-comm-suspend?
enable-reasoning! enable-request-id-headers? enable-server-load-tracking? enable-shm-tensor-arena?
enable-sleep-mode? fail-on-environ-validation? fault-tolerance-config= fingerprint-mode
gdn-prefill-backend guided-decoding-backend h11-max-header-count h11-max-incomplete-event-size
ignore-patterns* ir-op-priority= jit-monitor-mode jit-monitor-verbose? kda-decode-backend
kda-prefill-backend kernel-config= kv-cache-metrics-sample linear-backend
mamba-backend mamba-block-size mamba-cache-mode mamba-ssu-algorithm master-addr master-port
max-cudagraph-capture-size max-parallel-loading-workers max-seq-len-to-capture
mm-device-do-normalize? mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-tp-mode
mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-type mm-processor-device
mm-shm-cache-max-object-size-mb mm-tensor-ipc moe-backend optimization-level,-O performance-mode
prefix-caching-hash-algo pt-load-map-location= reasoning-config= renderer-num-workers
replayssm-buffer-len safetensors-load-strategy safetensors-prefetch-block-size
safetensors-prefetch-num-threads scheduler-reserve-full-isl? show-hidden-metrics-for-version
skip-mm-profiling? sleep-mode-offload-cudagraph? sparse-indexer-topk-backend
structured-outputs-config= swa-bounded-replay? use-replayssm? use-tqdm-on-load?
use-v2-block-manager! video-pruning-method
"""
LACKS = """
log settings but --log-level, --log-format: logging-config= log-config-file
copy of the /docs page: enable-offline-docs?
ranks that are started by hand; `ray start` adds nodes, --data-parallel-size N: headless!
    data-parallel-rank,-dpn data-parallel-start-rank,-dpr data-parallel-size-local,-dpl
    data-parallel-hybrid-lb,-dph? data-parallel-external-lb,-dpe?
    data-parallel-multi-port-external-lb,-dpm!
gRPC API: grpc! grpc-port
video in prompts, nor this setting for images and audio: trust-request-mm-kwargs?
    enable-mm-embeds? media-io-kwargs= mm-encoder-only? mm-encoder-fp8-scale-path
    mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin interleave-mm-strings?
    video-pruning-rate
classes of a user's own for this: tool-parser-plugin reasoning-parser-plugin
    model-class-overrides= io-processor-plugin scheduler-cls
    worker-extension-cls
logits processors of vLLM's contract; see --plugin: logits-processors*
built-in tools: tool-server
such effort; the template decides [auto]: anthropic-disabled-thinking-effort
text of a fingerprint: fingerprint-value
such measurement: collect-detailed-traces* kv-cache-metrics? cudagraph-metrics?
    enable-layerwise-nvtx-tracing? enable-mfu-metrics? enable-logging-iteration-details?
    ray-workers-use-nsight?
figures of drafts in answers [none]: per-request-spec-decode-metrics
buckets as a setting: custom-histogram-buckets=
such setting; --profile-dir is it: profiler-config=
server of tokens alone: tokens-only?
transfer of KV caches between servers: enable-scale-out? ec-transfer-config=
tokenizers but Hugging Face's [auto hf slow]: tokenizer-mode
other place of it: hf-config-path
revision of the code alone: code-revision
settings of quantization: quantization-config=
old methods: allow-deprecated-quantization?
hooks for training: enable-return-routed-experts? enable-trace-replay? aux-output-config=
    weight-transfer-config=
such flag; return_sampling_mask of a request is it: return-sampling-mask?
noise in 64 bits: use-fp64-gumbel?
models without their window: disable-sliding-window?
server without a tokenizer: skip-tokenizer-init?
format but Hugging Face's [auto hf]: config-format
partial sleep: sleep-preserve-parameter-names*
model code but its own [auto]: model-impl
settings of the loader [{}]: model-loader-extra-config=
plugins of platforms [{}]: additional-config=
diffusion models: diffusion-config,-dc=
watermarks: watermark-config=
n-gram embeddings: engram-config=
such LoRA adapters: enable-tower-connector-lora? fully-sharded-loras? default-mm-loras=
    specialize-active-lora? enable-mixed-moe-lora-format? enable-moe-shared-loras?
    max-lora-cls-labels
choice of layers; an adapter's own count: lora-target-modules*
stochastic rounding of states of recurrent layers: enable-mamba-cache-stochastic-rounding?
stochastic rounding of states of recurrent layers [0]: mamba-cache-philox-rounds
a choice of the type of states [auto]: mamba-cache-dtype mamba-ssm-cache-dtype
second limit; --max-num-batched-tokens is the one: max-num-scheduled-tokens
second limit; --max-num-seqs is the one: max-num-active-seqs
adaptive threshold: long-prefill-token-threshold-adaptive?
watermark [0 0.0]: watermark
interval [1]: prefill-schedule-interval
interval of chunks [1]: stream-interval
retention but least recently used [0]: prefix-cache-retention-interval
unit but a page; set --page-size: prefix-match-unit
types by layer: kv-cache-dtype-skip-layers*
models with shared KV caches: kv-sharing-fast-prefill?
back end of host memory but its own [native]: kv-offloading-backend
weights in host memory [0 0.0 auto]: offload-backend cpu-offload-gb cpu-offload-params*
    offload-group-size offload-params*
weights in host memory [1]: offload-num-in-group offload-prefetch-step
launcher but Ray [ray mp uni]: distributed-executor-backend
ranks that are started by hand; `ray start` adds nodes, --data-parallel-size N [1]: nnodes,-n
ranks that are started by hand; `ray start` adds nodes, --data-parallel-size N [0]: node-rank,-r
binding to memory nodes: numa-bind? numa-bind-nodes*
binding to cores; see --threads: numa-bind-cpus*
such flag; set CUDA_VISIBLE_DEVICES: device-ids
context parallelism [1]: decode-context-parallel-size,-dcp prefill-context-parallel-size,-pcp
    dcp-kv-cache-interleave-size cp-kv-cache-interleave-size
supervisor of ranks; Ray replaces what fails: data-parallel-supervisor-port
    dp-supervisor-probe-interval-s dp-supervisor-probe-timeout-s
    dp-supervisor-probe-failure-threshold
sequence parallelism: enable-hc-sp?
expert parallelism: enable-expert-parallel,-ep? enable-ep-weight-filter? enable-elastic-ep?
    elastic-ep-max-dp-size enable-eplb? eplb-config=
expert parallelism [linear]: expert-placement-strategy
batches that overlap: enable-dbo?
batches that overlap [0]: ubatch-size
classes of a user's own for this [auto]: worker-cls
such flag; --runner and --convert are it [auto generate]: task
such flag; set it by --hf-overrides: rope-scaling rope-theta
"""
"""What Rayfin has none of, [values that ask for nothing of it], and the flags that ask for it."""


def _named(written: str, outcome: Outcome) -> VllmFlag:
    form = FORMS.get(written[-1], "value")
    long, *short = written.rstrip("".join(FORMS)).split(",")
    return VllmFlag((f"--{long}", *short), outcome, form)


def _alias(setting: str) -> Alias:
    words = WORDS.get(setting, {})
    return Alias(setting, words, setting in SIZES, NOTHING.get(setting, ()))


def _flags() -> Iterator[VllmFlag]:
    for written in SAME.split():
        yield _named(written, _alias(re.split("[,?*=]", written)[0].replace("-", "_")))
    for written, setting in ALIASES.items():
        yield _named(written, _alias(setting))
    for written, outcome in REWRITTEN.items():
        yield _named(written, outcome)
    for written in ACCEPTED.split():
        yield _named(written, Accepted())
    for row in re.split(r"\n(?! )", LACKS.strip()):
        missing, _, names = row.partition(": ")
        missing, _, but = missing.partition(" [")
        for written in names.split():
            yield _named(written, Lacks(missing, tuple(but.rstrip("]").split())))


VLLM_FLAGS: tuple[VllmFlag, ...] = tuple(_flags())
