"""Changes of a model's configuration by ``hf_overrides``: each one counts, or is an error.

transformers takes any name, and leaves a renamed value as it was if the new name is there too.
"""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn

from huggingface_hub.errors import StrictDataclassError

from rayfin.actors.errors import InvalidConfig

if TYPE_CHECKING:  # with the classes of all families, which take seconds
    from transformers import PretrainedConfig

CONFIG_ERRORS = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)

NEW_NAMES = {"torch_dtype": "dtype"}

ROPE = "rope_parameters"
IN_ROPE = {
    **{"rope_theta": "rope_theta", "rotary_emb_base": "rope_theta"},
    **{"partial_rotary_factor": "partial_rotary_factor", "rotary_pct": "partial_rotary_factor"},
}
"""Values that lay beside ``rope_scaling``, and their names in ``rope_parameters``."""

OF_ANY_TYPE = frozenset(IN_ROPE.values())

NOT_OF_MODELS = frozenset(
    (
        *("classifier_from_token", "is_original_qwen3_reranker", "classifier_pooling"),
        *("is_matryoshka", "matryoshka_dimensions", "num_labels", "sentence_transformers"),
    )
)
"""Names that are read of models that pool; no class of transformers declares them."""


def overridden(
    config: "PretrainedConfig", changes: Mapping[str, Any], *, any_name: bool = False
) -> "PretrainedConfig":
    """Returns the configuration with some of its values replaced, under old or new names.

    Objects are merged, as vLLM does.

    Args:
        any_name: the model has code of its own, which may read what no class declares.

    Raises:
        InvalidConfig: it has no such value or does not take it; or the value would not count.
    """
    values = _changed(config, changes, "", any_name=any_name)
    values.pop("transformers_version", None)
    try:
        changed: PretrainedConfig = type(config).from_dict(values)
    except (*CONFIG_ERRORS, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise InvalidConfig(f"hf_overrides: {reason}", "hf_overrides") from error
    _require_effect(config, changed, changes, "")
    changed.name_or_path = config.name_or_path
    return changed


def _changed(
    config: "PretrainedConfig", changes: Mapping[str, Any], path: str, *, any_name: bool
) -> dict[str, Any]:
    values = config.to_dict()
    for name, change in changes.items():
        attribute = _name_in(config, name)
        part: Any = getattr(config, attribute, None)
        rope = values.get(ROPE) if hasattr(config, ROPE) else None
        if attribute == "eos_token_id":
            _refuse(f"{path}{name} is no part of the model: use override_generation_config")
        if hasattr(part, "to_dict") and hasattr(part, "attribute_map"):
            if not isinstance(change, Mapping):
                _refuse(f"{path}{name} must be an object")
            values[attribute] = _changed(part, change, f"{path}{name}.", any_name=any_name)
        elif hasattr(config, ROPE) and attribute in (ROPE, "rope_scaling", *IN_ROPE):
            new = {IN_ROPE[attribute]: change} if attribute in IN_ROPE else change
            values[ROPE] = _rope(rope or {}, new, path + name)
            if attribute in IN_ROPE and attribute in values:
                values[attribute] = change
        elif attribute in _names(config, values) or attribute in NOT_OF_MODELS or any_name:
            values[attribute] = _merged(values.get(attribute), change)
            if attribute == "num_labels":
                values = {key: values[key] for key in values if key not in ("id2label", "label2id")}
        else:
            _refuse_name(config, values, path, name)
    return values


def _name_in(config: "PretrainedConfig", name: str) -> str:
    """A name as the class has it."""
    new = NEW_NAMES.get(name, name)
    return type(config).attribute_map.get(new, new)


def _names(config: "PretrainedConfig", values: Mapping[str, Any]) -> set[str]:
    return {*values, *(field.name for field in fields(type(config)))}


def _merged(known: Any, change: Any) -> Any:
    if not (isinstance(known, Mapping) and isinstance(change, Mapping)):
        return change
    return {**known, **{name: _merged(known.get(name), part) for name, part in change.items()}}


def _rope(known: Mapping[str, Any], change: Any, path: str) -> dict[str, Any]:
    """The rotary settings with a change of theirs; one of ``rope_type`` leaves no other behind."""
    if not isinstance(change, Mapping):
        _refuse(f'{path} must be an object; "{ROPE}": {{"rope_type": "default"}} scales nothing')
    layers = [layer for layer, settings in known.items() if isinstance(settings, Mapping | None)]
    if any(known[layer] for layer in layers):
        if not set(change) <= set(layers):
            each = ", ".join(f"{ROPE}.{layer}" for layer in layers)
            _refuse(f"{path} has a value for each kind of layer: set it in {each}")
        parts = {
            layer: _flat_rope(known[layer] or {}, settings, f"{path}.{layer}")
            for layer, settings in change.items()
        }
        return {**known, **parts}
    return _flat_rope(known, change, path)


def _flat_rope(known: Mapping[str, Any], change: Mapping[str, Any], path: str) -> dict[str, Any]:
    from transformers.modeling_rope_utils import RopeParameters

    new = {"rope_type" if name == "type" else name: setting for name, setting in change.items()}
    before = known.get("rope_type", "default")
    kind = new.get("rope_type", before)
    if kind != before:
        known = {name: setting for name, setting in known.items() if name in OF_ANY_TYPE}
    names = {*known, *RopeParameters.__annotations__}
    for name in new:
        if name not in names:
            _refuse(f"{path} has no {name!r}{_near(name, names)}")
        if kind == "default" and name not in (*OF_ANY_TYPE, *known, "rope_type", "mrope_section"):
            _refuse(f"{path}.{name} has no effect without a rope_type, such as 'yarn'")
    return {**known, **new}


def _require_effect(
    before: "PretrainedConfig", after: "PretrainedConfig", changes: Mapping[str, Any], path: str
) -> None:
    """Raises where a value has stayed as it was: another one goes before it."""
    for name, change in changes.items():
        attribute = _name_in(before, name)
        if attribute in (ROPE, "rope_scaling", *IN_ROPE) and hasattr(after, ROPE):
            new = {IN_ROPE[attribute]: change} if attribute in IN_ROPE else change
            if not _holds(getattr(after, ROPE), new):
                _refuse(f"{path}{name} has no effect: another value of the model goes before it")
            continue
        old, held = getattr(before, attribute, None), getattr(after, attribute, None)
        if isinstance(change, Mapping):
            if hasattr(held, "attribute_map"):
                _require_effect(old, held, change, f"{path}{name}.")  # type: ignore[arg-type]
        elif held != change and str(held) != f"torch.{change}" and held == old:
            _refuse(f"{path}{name} has no effect: another value of the model goes before it")


def _holds(values: Any, change: Any) -> bool:
    if isinstance(change, Mapping):
        held = values if isinstance(values, Mapping) else {}
        return all(
            _holds(held.get("rope_type" if name == "type" else name), part)
            for name, part in change.items()
        )
    return bool(values == change)


def _refuse_name(
    config: "PretrainedConfig", values: Mapping[str, Any], path: str, name: str
) -> NoReturn:
    for key in config.sub_configs:
        part = getattr(config, key, None)
        turned = hasattr(part, ROPE) and name in (ROPE, "rope_scaling", *IN_ROPE)
        if part is not None and (turned or name in {*part.to_dict(), *type(part).attribute_map}):
            _refuse(f"{path}{name} is a value of {path}{key}: {{{key!r}: {{{name!r}: ...}}}}")
    names = _names(config, values) | set(type(config).attribute_map)
    _refuse(f"{type(config).__name__} has no {path}{name}{_near(name, names)}")


def _near(name: str, names: set[str]) -> str:
    near = get_close_matches(name, sorted(one for one in names if not one.startswith("_")), 3)
    return f"; near names: {', '.join(near)}" if near else ""


def _refuse(why: str) -> NoReturn:
    raise InvalidConfig(f"hf_overrides: {why}", "hf_overrides")
