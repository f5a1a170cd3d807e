"""The fields of all APIs that ask for a form of the answer, as one StructuredOutputs and its path.

Each function checks the shape of what it reads; ``make_grammar`` checks the schema, the pattern or
the grammar itself.

Raises:
    InvalidRequest: ``param`` is the path of the value.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.text.checks import as_choice, as_object, missing, wrong_type

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Of ``structured_outputs``; a request has at most one."""

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
"""Types of ``response_format``."""

GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
"""vLLM's older fields, and the kinds that they are now."""

WHITESPACE = "guided_whitespace_pattern"


class AnswerFormat(NamedTuple):
    """The form of an answer, and where the request says it."""

    outputs: StructuredOutputs
    param: str  # of the schema, the pattern or the grammar, for errors


def asked_format(
    response_format: Mapping[str, Any] | None,
    structured_outputs: object,
    guided: Mapping[str, Any],
) -> AnswerFormat | None:
    """Returns the one form that a completion asks for, or None for plain text.

    Args:
        guided: vLLM's older fields by their names; None is the same as left out.
    """
    given = {name: value for name, value in guided.items() if value is not None}
    if structured_outputs is not None:  # the newer name counts, as in vLLM
        given = {name: value for name, value in given.items() if name == WHITESPACE}
    whitespace = given.pop(WHITESPACE, None)
    forms: dict[str, AnswerFormat] = {}
    if response_format is not None:
        form = read_response_format(response_format, "response_format")
        if form is not None:
            forms["response_format"] = form
    if structured_outputs is not None:
        forms["structured_outputs"] = read_structured_outputs(
            structured_outputs, "structured_outputs"
        )
    for name, value in given.items():
        forms[name] = AnswerFormat(_outputs({GUIDED[name]: _kind(GUIDED[name], value, name)}), name)
    if len(forms) > 1:
        raise InvalidRequest(
            f"An answer has one form, and the request asks for several: {', '.join(forms)}.",
            list(forms)[-1],
        )
    form = next(iter(forms.values()), None)
    return form if whitespace is None else _with_whitespace(form, whitespace)


def read_response_format(
    value: object, path: str, *, flat: bool = False, named: bool = True
) -> AnswerFormat | None:
    """Returns the form of a format object: text (None), json_object, json_schema, structural_tag.

    Args:
        flat: name, schema and strict are beside the type, as in Responses ``text.format`` and
            Anthropic's ``output_config.format``, where structural_tag is unknown.
        named: a schema needs a name.
    """
    given = as_object(value, path)
    kind = _present(given, "type", path)
    kind = as_choice(kind, FORMATS[:-1] if flat else FORMATS, f"{path}.type")
    if kind == "text":
        return None
    if kind == "structural_tag":
        return AnswerFormat(StructuredOutputs(structural_tag=given), path)
    if kind == "json_object":
        if given.get("schema") is not None or given.get("json_schema") is not None:
            raise InvalidRequest(
                f"{path} of type json_object takes no schema; use the type json_schema.",
                f"{path}.type",
            )
        return AnswerFormat(StructuredOutputs(json_object=True), path)
    if not flat:
        path = f"{path}.json_schema"
        given = as_object(_present(given, "json_schema", path.rpartition(".")[0]), path)
    return _schema_format(given, path, named)


def read_structured_outputs(value: object, path: str) -> AnswerFormat:
    """Returns the form of a ``structured_outputs`` object: exactly one kind, and its options."""
    if isinstance(value, StructuredOutputs):
        named: Mapping[str, Any] = {
            name: getattr(value, name) for name in StructuredOutputs.__dataclass_fields__
        }
    else:
        named = as_object(value, path)
    given = {name: member for name, member in named.items() if member is not None}
    for name in given:
        if name not in KINDS and name not in _OPTIONS:
            raise InvalidRequest(f"{path} has no field {name[:64]!r}.", f"{path}.{name[:64]}")
    kinds = [name for name in KINDS if name in given]
    if len(kinds) != 1:
        which = f"got {', '.join(kinds)}" if kinds else "got none"
        raise InvalidRequest(f"{path} must have exactly one of {', '.join(KINDS)}, {which}.", path)
    checked = {
        name: _kind(name, member, f"{path}.{name}")
        if name in KINDS
        else _OPTIONS[name](member, f"{path}.{name}")
        for name, member in given.items()
    }
    checked.pop("disable_fallback", None)  # of vLLM's choice between libraries
    return AnswerFormat(_outputs(checked), f"{path}.{kinds[0]}")


def check_size(outputs: StructuredOutputs, param: str, max_bytes: int) -> None:
    """Refuses a form that is longer than ``max_bytes`` bytes, about as compact JSON."""
    if size_up_to(outputs, max_bytes) > max_bytes:
        raise InvalidRequest(
            f"{param} is too complex: it has more than {max_bytes} bytes (--max-grammar-bytes).",
            param,
            "schema_too_complex",
        )


def size_up_to(outputs: StructuredOutputs, max_bytes: int) -> int:
    """Returns the bytes of a form. Counts no further than ``max_bytes``: megabytes cost no more."""
    size = 0
    waiting: list[Any] = [getattr(outputs, kind) for kind in KINDS]
    while waiting and size <= max_bytes:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, Mapping):
            size += sum(len(str(name)) for name in value) + 4 * len(value)
            waiting += value.values()
        elif isinstance(value, list | tuple):
            size += len(value)
            waiting += value
    return size


def _schema_format(given: Mapping[str, Any], path: str, named: bool) -> AnswerFormat:
    """A JSON schema with its name; without ``strict`` it is as strict as with it."""
    if named:
        _text(_present(given, "name", path), f"{path}.name")
    schema = _present(given, "schema", path)
    if not isinstance(schema, Mapping | bool):
        raise wrong_type("an object", schema, f"{path}.schema")
    strict = given.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type("a boolean", strict, f"{path}.strict")
    return AnswerFormat(StructuredOutputs(json=schema, strict=strict), f"{path}.schema")


def _kind(name: str, value: object, path: str) -> Any:
    """One of KINDS, with the type that StructuredOutputs declares, and not empty."""
    if name == "json_object":
        if value is not True:
            if not isinstance(value, bool):
                raise wrong_type("true", value, path)
            raise InvalidRequest(f"{path} must be true; leave it out for plain text.", path)
        return value
    if name == "choice":
        return _choices(value, path)
    if name == "json" and isinstance(value, bool):
        return value
    if name in ("json", "structural_tag") and isinstance(value, Mapping):
        if name == "structural_tag" and not value:
            raise InvalidRequest(f"{path} must not be empty.", path)
        return value
    objects = name in ("json", "structural_tag")
    return _text(value, path, "an object or a string" if objects else "a string")


def _choices(value: object, path: str) -> list[str]:
    if not isinstance(value, list | tuple):
        raise wrong_type("a list of strings", value, path)
    if not value:
        raise InvalidRequest(f"{path} must not be empty.", path)
    for i, choice in enumerate(value):
        if not isinstance(choice, str):
            raise wrong_type("a string", choice, f"{path}[{i}]")
    return list(value)


def _with_whitespace(form: AnswerFormat | None, pattern: object) -> AnswerFormat:
    _text(pattern, WHITESPACE)
    if form is None or (form.outputs.json is None and form.outputs.json_object is None):
        raise InvalidRequest(f"{WHITESPACE} needs a form that is JSON.", WHITESPACE)
    if form.outputs.whitespace_pattern is not None:
        raise InvalidRequest("The whitespace pattern is given twice.", WHITESPACE)
    given = {name: getattr(form.outputs, name) for name in StructuredOutputs.__dataclass_fields__}
    return AnswerFormat(_outputs({**given, "whitespace_pattern": pattern}), form.param)


def _outputs(given: Mapping[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(**given)


def _present(given: Mapping[str, Any], name: str, path: str) -> Any:
    if given.get(name) is None:
        raise missing(f"{path}.{name}")
    return given[name]


def _text(value: object, path: str, expected: str = "a string") -> str:
    if not isinstance(value, str):
        raise wrong_type(expected, value, path)
    if not value:
        raise InvalidRequest(f"{path} must not be empty.", path)
    return value


def _boolean(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise wrong_type("a boolean", value, path)
    return value


_OPTIONS: dict[str, Callable[[object, str], Any]] = {
    "whitespace_pattern": _text,
    "disable_any_whitespace": _boolean,
    "disable_additional_properties": _boolean,
    "disable_fallback": _boolean,
    "strict": _boolean,
}
