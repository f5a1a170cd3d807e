"""The words that flags of a choice take, as types and by the name of the field."""

from typing import Any, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3"]
LoadFormat = Literal["auto", "dummy"]
SchedulerName = Literal["v1", "v0"]
Policy = Literal["fcfs", "priority", "fair"]
BatchMode = Literal["idle", "share"]
Switch = Literal["on", "off"]
Preemption = Literal["recompute", "swap"]
Device = Literal["auto", "cpu", "cuda"]
Quantization = Literal["int8", "int4", "dequantize"]
Activations = Literal["exact", "bfloat16", "int8", "fp8"]
Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
LoraDtype = Literal["auto", "float32", "bfloat16", "float16"]
SeesAhead = Literal["nothing", "image", "prompt"]
"""Which later tokens a token of a prompt sees: none, those of its image, or the whole prompt."""

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning"]

CHOICES: dict[str, Any] = {
    "logprobs_mode": LogprobsMode,
    "dtype": Dtype,
    "kv_cache_dtype": KVCacheDtype,
    "load_format": LoadFormat,
    "runner": Runner,
    "convert": Convert,
    "scheduler": SchedulerName,
    "policy": Policy,
    "batch_mode": BatchMode,
    "sessions": Switch,
    "device": Device,
    "log_format": LogFormat,
    "log_level": LogLevel,
    "preemption": Preemption,
    "lora_dtype": LoraDtype,
    "quantization": Quantization,
    "activations": Activations,
}
OPTIONAL_CHOICES = ("preemption", "quantization")
