"""Reads a ``PoolingRecipe`` from a model's folder: sentence-transformers' files, or config.json.

The package sentence-transformers is not needed. Its format: ``modules.json`` names the modules in
order, each with a folder that holds its ``config.json``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.model_files.pooling_recipe import Activation, DenseLayer, Mode, PoolingRecipe

ENCODERS = frozenset(
    (
        *("bert", "roberta", "xlm-roberta", "distilbert", "nomic_bert", "modernbert", "gte"),
        *("electra", "camembert"),
    )
)
REFUSED_ENCODERS = ("mpnet", "deberta", "deberta-v2", "albert", "xlnet", "funnel")
CLASSIFIER = "ForSequenceClassification"
LEGACY: dict[str, Mode] = {  # sentence-transformers before 5, in the order of its concatenation
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
VLLM_MODES: dict[str, Mode] = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
ACTIVATIONS: dict[str, Activation] = {
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Identity": "identity",
}
DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


def read_recipe(args: EngineArgs) -> PoolingRecipe | None:
    """Returns what the model pools, or None if it generates.

    Raises:
        InvalidConfig: a file or a setting is wrong.
        UnsupportedModel: a module or an architecture that is not served.
    """
    folder = _Folder(args)
    config = folder.json("config.json")
    # load_config tells what is wrong with a config.json that holds no object.
    if not isinstance(config, dict) or not _pools(args, config, folder):
        return None
    architecture = _architecture(config)
    overrides = args.hf_overrides or {}
    kind = str(config.get("model_type", ""))
    if kind in REFUSED_ENCODERS:
        raise UnsupportedModel(
            f"{architecture or kind} cannot be served: its attention does not go through "
            "transformers' attention registry",
            "model",
        )
    if "classifier_from_token" in overrides:
        return _token_classifier(config, overrides, folder)
    classifies = architecture.endswith(CLASSIFIER) or args.convert == "classify"
    if classifies and args.convert != "embed":
        return _classifier(config, args, folder)
    return _embedder(config, args, folder)


class _Folder:
    """The model's folder, or its files in the Hub's cache."""

    def __init__(self, args: EngineArgs) -> None:
        self.model = args.model
        self._revision = args.revision
        self.overrides = args.hf_overrides or {}

    def json(self, name: str) -> Any:
        """A JSON file; an empty object if there is none."""
        path = self.path(name)
        if path is None:
            return {}
        try:
            held = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidConfig(
                f"{name} of {self.model} is not valid JSON: {error}", "model"
            ) from None
        if name == "config.json" and isinstance(held, dict):
            return held | self.overrides
        return held

    def path(self, name: str) -> Path | None:
        if Path(self.model).is_dir():
            path = Path(self.model) / name
            return path if path.is_file() else None
        from transformers.utils.hub import cached_file

        try:
            cached = cached_file(
                self.model,
                name,
                revision=self._revision,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
        except OSError:
            return None
        return None if cached is None else Path(cached)


def _architecture(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or [""])[0])


def _pools(args: EngineArgs, config: Mapping[str, Any], folder: _Folder) -> bool:
    if args.runner != "auto":
        return args.runner == "pooling"
    if args.convert in ("embed", "classify") or args.pooler_config:
        return True
    if "classifier_from_token" in folder.overrides:
        return True
    architecture = _architecture(config)
    if architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")):
        return folder.path("modules.json") is not None
    known = config.get("model_type") in (*ENCODERS, *REFUSED_ENCODERS)
    encoder = known and not config.get("is_decoder")
    classes = architecture.endswith((CLASSIFIER, "Model", "ForMaskedLM"))
    return encoder or classes or folder.path("modules.json") is not None


def _embedder(config: Mapping[str, Any], args: EngineArgs, folder: _Folder) -> PoolingRecipe:
    encoder = config.get("model_type") in ENCODERS
    recipe: dict[str, Any] = {"modes": ("cls",) if encoder else ("lasttoken",), "normalize": True}
    if modules := folder.json("modules.json"):
        recipe = _read_modules(modules, folder)
    sentence = folder.json("sentence_bert_config.json")
    settings = folder.json("config_sentence_transformers.json")
    pooler = args.pooler_config or {}
    if unknown := pooler.keys() - {"pooling_type", "use_activation", "normalize", "dimensions"}:
        raise InvalidConfig(f"pooler_config has no {min(unknown)!r}", "pooler_config")
    if kind := pooler.get("pooling_type"):
        recipe["modes"] = (_vllm_mode(kind),)
    for name in ("use_activation", "normalize"):
        if pooler.get(name) is not None:
            recipe["normalize"] = bool(pooler[name])
    size = int(config.get("hidden_size") or config.get("dim") or config.get("n_embd") or 0)
    dense = recipe.get("dense", ())
    dimensions = dense[-1].outputs if dense else size * len(recipe["modes"])
    prompts = {name: text for name, text in (settings.get("prompts") or {}).items() if text}
    similarity = settings.get("similarity_fn_name") or "cosine"
    return PoolingRecipe(
        kind="embed",
        encoder=encoder,
        dimensions=dimensions,
        matryoshka=_matryoshka(config),
        cut=pooler.get("dimensions"),
        max_tokens=sentence.get("max_seq_length"),
        lower_case=bool(sentence.get("do_lower_case")),
        prompts=tuple(prompts.items()),
        default_prompt=settings.get("default_prompt_name"),
        similarity="dot" if similarity == "dot" else "cosine",
        **recipe,
    )


def _matryoshka(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    if given := config.get("matryoshka_dimensions"):
        return tuple(given)
    return () if config.get("is_matryoshka") else None


def _read_modules(modules: Any, folder: _Folder) -> dict[str, Any]:
    """The pooling, the dense layers and the normalization that modules.json names in order."""
    recipe: dict[str, Any] = {"modes": ("mean",), "normalize": False, "dense": ()}
    for place, module in enumerate(modules):
        name, path = str(module["type"]).rpartition(".")[2], module.get("path", "")
        if recipe["normalize"] and name == "Dense":
            raise UnsupportedModel("modules.json has a Dense behind Normalize", "model")
        if name == "Transformer" and place == 0:
            if path:
                raise UnsupportedModel(f"modules.json has its Transformer in {path!r}", "model")
        elif name == "Pooling":
            pooling = folder.json(f"{path}/config.json")
            recipe["modes"] = _modes(pooling)
            recipe["include_prompt"] = bool(pooling.get("include_prompt", True))
        elif name == "Dense":
            recipe["dense"] = (*recipe["dense"], _dense(folder.json(f"{path}/config.json"), path))
        elif name == "Normalize":
            recipe["normalize"] = True
        elif name != "Dropout":
            raise UnsupportedModel(
                f"modules.json has a module that is not served: {module['type']}", "model"
            )
    return recipe


def _modes(pooling: Mapping[str, Any]) -> tuple[Mode, ...]:
    given = pooling.get("pooling_mode")
    if given is None:
        given = [mode for name, mode in LEGACY.items() if pooling.get(name)] or ["mean"]
    modes = (given,) if isinstance(given, str) else tuple(given)
    for mode in modes:
        if mode not in LEGACY.values():
            raise UnsupportedModel(f"pooling mode {mode!r} is not served", "model")
    return modes


def _dense(config: Mapping[str, Any], path: str) -> DenseLayer:
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = activation.rpartition(".")[2]
    if not activation.startswith("torch.") or name not in DENSE_ACTIVATIONS:
        raise UnsupportedModel(f"{path} has activation {activation!r}, not served", "model")
    if config.get("module_input_name", "sentence_embedding") != "sentence_embedding":
        raise UnsupportedModel(f"{path} reads {config['module_input_name']!r}, not served", "model")
    return DenseLayer(
        path,
        int(config["in_features"]),
        int(config["out_features"]),
        bool(config.get("bias", True)),
        name,
        bool(config.get("use_residual")),
    )


def _vllm_mode(name: Any) -> Mode:
    mode = VLLM_MODES.get(str(name).upper())
    if mode is None:
        raise InvalidConfig(
            f"pooling_type must be one of {', '.join(VLLM_MODES)}, got {name!r}", "pooler_config"
        )
    return mode


def _classifier(config: Mapping[str, Any], args: EngineArgs, folder: _Folder) -> PoolingRecipe:
    if not _architecture(config).endswith(CLASSIFIER):
        raise UnsupportedModel(
            f"{_architecture(config)} has no head for classes: convert 'classify' is for "
            f"*{CLASSIFIER}",
            "convert",
        )
    encoder = config.get("model_type") in ENCODERS
    names = config.get("id2label") or {}
    count = len(names) or int(config.get("num_labels", 2))
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))
    mode: Mode = "cls" if encoder else "lasttoken"
    if config.get("classifier_pooling") == "mean":
        mode = "mean"
    activation = _score_activation(config, count)
    one = count == 1 or config.get("problem_type") == "multi_label_classification"
    pooler = args.pooler_config or {}
    if pooler.get("use_activation") is False:
        activation = "identity"
    sentence = folder.json("sentence_bert_config.json")
    return PoolingRecipe(
        kind="classify",
        encoder=encoder,
        modes=(mode,),
        dimensions=count,
        labels=labels,
        activation=activation,
        class_activation="sigmoid" if one else "softmax",
        max_tokens=sentence.get("max_seq_length"),
    )


def _score_activation(config: Mapping[str, Any], count: int) -> Activation:
    """What CrossEncoder applies to logits: its own setting, else sigmoid for a single one."""
    settings = config.get("sentence_transformers") or {}
    named = settings.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    if named is None:
        return "sigmoid" if count == 1 else "identity"
    name = str(named).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {named!r} of scores is not served", "model")
    return ACTIVATIONS[name]


def _token_classifier(
    config: Mapping[str, Any], overrides: Mapping[str, Any], folder: _Folder
) -> PoolingRecipe:
    """A causal model whose head's rows of some tokens are the classes, as Qwen3-Reranker."""
    tokens = tuple(overrides["classifier_from_token"])
    two_way = bool(overrides.get("is_original_qwen3_reranker"))
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise InvalidConfig("classifier_from_token must be a list of tokens", "hf_overrides")
    if two_way and len(tokens) != 2:
        raise InvalidConfig(
            "is_original_qwen3_reranker needs two tokens in classifier_from_token", "hf_overrides"
        )
    labels = ("LABEL_0",) if two_way else tokens
    return PoolingRecipe(
        kind="classify",
        encoder=False,
        modes=("lasttoken",),
        dimensions=len(labels),
        labels=labels,
        activation="sigmoid" if len(labels) == 1 else "identity",
        class_activation="sigmoid" if len(labels) == 1 else "softmax",
        label_tokens=tokens,
        two_way=two_way,
    )
