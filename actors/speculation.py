"""Settings of speculative decoding, under vLLM's names: ``--speculative-config``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_type_hints

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.parts import PartUsage

if TYPE_CHECKING:
    from rayfin.actors.config import EngineArgs, ModelFacts

Method = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"]

HEADS = ("eagle", "eagle3", "mtp")
"""Methods that read the hidden states of the model."""

FIELD = "speculative_config"
DEFAULT_TOKENS = {"cpu": 5, "cuda": 7}
SUFFIX_TOKENS = 16
MOST_TOKENS = 16

LOSSY = {
    "fly": "accepts tokens that the model would not have sampled",
    "synthetic": "accepts tokens at a set rate, whatever they are",
    "synthetic_acceptance_rate": "accepts tokens at a set rate, whatever they are",
    "synthetic_acceptance_rates": "accepts tokens at a set rate, whatever they are",
    "synthetic_acceptance_length": "accepts tokens at a set rate, whatever they are",
    "rejection_sample_method": "has no meaning: a draft is right if the sampler draws it",
    "draft_sample_method": "has no meaning: drafts are always the likeliest tokens",
}
"""vLLM's keys that change tokens, or what a token's chance is."""

KNOWN_ELSEWHERE = {
    "medusa": "Medusa heads",
    "mlp_speculator": "MLP speculators",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Who drafts, and how many tokens at most. vLLM's keys, and ``adaptive``."""

    method: Method
    model: str | None = None  # folder or Hugging Face name of a draft model or head
    num_speculative_tokens: int | None = None  # most drafts of a row in a step; None: by device
    prompt_lookup_min: int = 2  # tokens of the shortest n-gram that is looked up ...
    prompt_lookup_max: int = 4  # ... and of the longest
    suffix_decoding_max_cached_requests: int = 10_000  # ended requests that are looked up too
    suffix_decoding_max_spec_factor: float = 1.0  # drafts for each token that matches
    adaptive: bool = True  # fewer drafts, or none, where they would not gain time

    def __post_init__(self) -> None:
        tokens, shortest, longest = (
            *(self.num_speculative_tokens, self.prompt_lookup_min, self.prompt_lookup_max),
        )
        if tokens is not None and not 1 <= tokens <= MOST_TOKENS:
            _refuse(f"num_speculative_tokens must be between 1 and {MOST_TOKENS}, got {tokens}")
        if not 1 <= shortest <= longest <= 16:
            _refuse(
                "prompt_lookup_min and prompt_lookup_max must be between 1 and 16, the second not "
                f"below the first, got {shortest} and {longest}"
            )
        if self.suffix_decoding_max_cached_requests < 0:
            _refuse("suffix_decoding_max_cached_requests must be at least 0")
        if not 0 < self.suffix_decoding_max_spec_factor <= 16:
            _refuse("suffix_decoding_max_spec_factor must be over 0 and at most 16")

    @property
    def reads_states(self) -> bool:
        """Whether a head of the model drafts."""
        return self.method in HEADS

    @property
    def one_device(self) -> bool:
        """Whether what drafts has weights, which no ranks share."""
        return self.method in ("draft_model", *HEADS)

    def most_tokens(self, device: str) -> int:
        """Most drafts of a row in a step on a ``device`` ("cpu", "cuda")."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return SUFFIX_TOKENS if self.method == "suffix" else DEFAULT_TOKENS[device]


def read_speculation(
    config: "str | Mapping[str, Any] | None",
    method: str | None = None,
    model: str | None = None,
    tokens: int | None = None,
) -> SpeculativeConfig | None:
    """The settings of ``speculative_config`` (JSON or a mapping) and of the single flags.

    Returns None if nothing is set.

    Raises:
        InvalidConfig: an unknown, lossy or malformed setting, or one that is set twice.
    """
    given = _mapping(config)
    singles = {"method": method, "model": model, "num_speculative_tokens": tokens}
    for key, value in singles.items():
        if value is not None and given.setdefault(key, value) != value:
            _refuse(f"{key} is set twice: {given[key]!r} and {value!r}")
    given = {key: value for key, value in given.items() if value is not None}
    if not given:
        return None
    if given == {"method": "none"}:
        return None
    if given.get("method") == "ngram_gpu":
        given["method"] = "ngram"
    if str(given.get("method")).endswith("_mtp"):  # vLLM's old names: deepseek_mtp, glm4_moe_mtp
        given["method"] = "mtp"
    if given.get("model") in get_args(Method):  # vLLM takes "ngram" as a model's name too
        given.setdefault("method", given.pop("model"))
    _check_keys(given)
    if given.get("method") is None and given.get("model") is not None:
        given["method"] = "draft_model"
    _check_method(given)
    return SpeculativeConfig(**given)


def _mapping(config: "str | Mapping[str, Any] | None") -> dict[str, Any]:
    if config is None:
        return {}
    read: Any = config
    if isinstance(config, str):
        try:
            read = json.loads(config)
        except ValueError as error:
            _refuse(f"is not JSON: {error}")
    if not isinstance(read, Mapping):
        _refuse(f"must be an object with a method, got {read!r}")
    return dict(read)


def _check_keys(given: Mapping[str, Any]) -> None:
    hints = get_type_hints(SpeculativeConfig)
    known = [field.name for field in fields(SpeculativeConfig)]
    for key, value in given.items():
        if key in LOSSY:
            _refuse(f"{key} {LOSSY[key]}; remove it")
        if key not in known:
            _refuse(f"has an unknown key {key!r}; known: {', '.join(known)}")
        kinds = get_args(hints[key]) or (hints[key],)
        kinds = (int, float) if hints[key] is float else kinds
        if key != "method" and (type(value) not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds if kind is not type(None))
            _refuse(f"{key} must be of type {names}, got {value!r}")


def _check_method(given: Mapping[str, Any]) -> None:
    method, methods = given.get("method"), get_args(Method)
    if method in LOSSY:
        _refuse(f"method {method!r} {LOSSY[method]}; choose one of {', '.join(methods)}")
    if method in KNOWN_ELSEWHERE:
        _refuse(
            f"Rayfin does not draft with {KNOWN_ELSEWHERE[method]} ({method!r}); choose one of "
            f"{', '.join(methods)}"
        )
    if method not in methods:
        _refuse(f"must name a method, one of {', '.join(methods)}, or none, got {method!r}")
    if method in ("draft_model", "eagle", "eagle3"):
        if given.get("model") is None:
            _refuse(f"method {method!r} needs a model")
    elif given.get("model") is not None:
        _refuse(f"model has no meaning with method {method!r}")


def _refuse(rule: str) -> NoReturn:
    raise InvalidConfig(f"{FIELD} {rule}", FIELD)


def chosen_speculation(args: "EngineArgs", facts: "ModelFacts") -> SpeculativeConfig | None:
    """Who drafts in an engine of these settings: what they say, or ``ngram`` on one CPU device.

    An n-gram costs a lookup. A step has a draft only where it gains time, and no token changes. So
    it is on wherever it needs no memory: recurrent layers would keep states for drafts, and ranks
    measure no times. On a GPU steps with drafts leave the CUDA graphs. Without the compiled kernels
    the last bits of a logit depend on how many tokens a step computes.
    """
    if args.sets_speculation:
        return args.speculation
    alone = args.tensor_parallel_size * args.pipeline_parallel_size == 1
    decodes = bool(facts.page_bytes) and not facts.state_bytes and not facts.whole_prompts
    decodes = decodes and facts.fixed_bits and not facts.pools
    if facts.device != "cpu" or args.scheduler != "v1" or not alone or not decodes:
        return None
    return SpeculativeConfig(method="ngram")


@dataclass(slots=True, frozen=True)
class DraftUsage(PartUsage):
    """What became of the drafts of a call."""

    drafts: int = 0  # rows with drafts, in each decode step
    tokens: int = 0  # that were drafted ...
    accepted: tuple[int, ...] = ()  # ... and of those at place 1, 2, ... of a draft, the right ones

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that were right."""
        return sum(self.accepted)
