"""Ranks and scales of an adapter_config.json; whatever is not plain LoRA is refused."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayfin.actors.adapters.files import CONFIG, invalid

IGNORED = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules"),
        *("fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform"),
        *("lora_dropout", "megatron_config", "megatron_core", "peft_version", "qalora_group_size"),
        *("revision", "runtime_config", "target_modules", "task_type"),
        *("corda_config", "eva_config", "loftq_config", "lora_ga_config"),  # of initialisation
    )
)
"""Fields that say how an adapter was trained, or repeat what its tensors say."""

READ = frozenset(
    (
        *("alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r"),
        *("rank_pattern", "use_rslora"),
    )
)

PLAIN: Mapping[str, Any] = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "bias": "none",
    "kasa_config": None,
    "layer_replication": None,
    "lora_bias": False,
    "modules_to_save": None,
    "monteclora_config": None,
    "target_parameters": None,
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "velora_config": None,
}
"""Fields that must have peft's default: with another value the adapter is more than A and B."""

UNCHANGED_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base weights as they are; PiSSA, OLoRA, CorDA, LoftQ do not."""


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """What decides the products of an adapter, beside its tensors."""

    r: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank(self, module: str) -> int:
        """The rank at a module's path."""
        return self.rank_pattern.get(_matching(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """The factor of B(A x) at a module's path."""
        alpha = self.alpha_pattern.get(_matching(self.alpha_pattern, module), self.alpha)
        rank = self.rank(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_settings(config: Mapping[str, Any], max_rank: int) -> AdapterSettings:
    """Checks an adapter_config.json.

    Raises:
        InvalidRequest: a field whose value is not served; the message names it.
    """
    if config.get("peft_type") != "LORA":
        raise _refused("peft_type", config.get("peft_type"), "only 'LORA' is served")
    for name, value in config.items():
        if name in PLAIN and value not in (PLAIN[name], None, [], {}):
            raise _refused(name, value, f"only {PLAIN[name]!r} is served")
        if name not in PLAIN and name not in READ and name not in IGNORED and value:
            raise _refused(name, value, "the field is not known")
    initial = config.get("init_lora_weights", True)
    if initial not in UNCHANGED_BASE:
        raise _refused("init_lora_weights", initial, "it changes the base weights")
    if not isinstance(config.get("use_rslora", False), bool):
        raise _refused("use_rslora", config["use_rslora"], "it must be true or false")
    settings = AdapterSettings(
        _rank("r", config.get("r", 8), max_rank),
        _alpha("lora_alpha", config.get("lora_alpha", 8)),
        config.get("use_rslora", False),
        {key: _rank("rank_pattern", rank, max_rank) for key, rank in _pattern(config, "rank")},
        {key: _alpha("alpha_pattern", alpha) for key, alpha in _pattern(config, "alpha")},
    )
    return settings


def _refused(name: str, value: Any, why: str) -> Exception:
    return invalid(f"{CONFIG}: {name} is {str(value)[:80]!r}: {why}.")


def _rank(name: str, value: Any, max_rank: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refused(name, value, "a rank is an integer of at least 1")
    if value > max_rank:
        raise _refused(name, value, f"it is over --max-lora-rank ({max_rank})")
    return value


def _alpha(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise _refused(name, value, "it must be a number")
    return float(value)


def _pattern(config: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    name = f"{kind}_pattern"
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise _refused(name, pattern, "it must be an object")
    for key in pattern:
        try:
            re.compile(key)
        except re.error:
            raise _refused(name, key, "it is no regular expression") from None
    return list(pattern.items())


def _matching(pattern: Mapping[str, Any], module: str) -> str:
    """The first key that is the module's path or an end of it, as peft finds it."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", module)), module)
