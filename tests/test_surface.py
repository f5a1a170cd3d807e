"""What users see, as a list: commands, routes, bodies, series, settings, and Python's names.

    python tests/test_surface.py --write     # writes tests/surface.json anew

Each line may be in somebody's script or dashboard. No module and no internal class is named.
"""

import ast
import asyncio
import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click
import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from transformers import PreTrainedTokenizerFast

import rayfin
from rayfin import data, llm, rollouts
from rayfin.actors import errors, failpoints
from rayfin.actors.config import EngineArgs
from rayfin.actors.metrics.engine_stats import (
    CACHE_LABELS,
    ENGINE_METRICS,
    EngineStats,
    engine_report,
)
from rayfin.actors.metrics.ledger import Ledger
from rayfin.actors.metrics.render import render
from rayfin.actors.scheduler.counters import EngineCounters
from rayfin.deployments.api.admin import Operated
from rayfin.deployments.api.app import build_api
from rayfin.deployments.app import build_app
from rayfin.deployments.cli.main import cli
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.edge.listen_options import CALLBACK, CALLBACK_PATH
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.anthropic_errors import TYPES
from rayfin.deployments.http.errors import HTTP_CODES
from rayfin.deployments.http.keys import ApiKeys
from rayfin.deployments.serve.admin_port import build_admin_api
from rayfin.deployments.serve.preflight import DEMO_FOLDER
from rayfin.deployments.telemetry.ingress_counters import INGRESS_METRICS, IngressCounters
from rayfin.deployments.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "surface.json"
FAKES = ROOT / "tests" / "deployments" / "api" / "conftest.py"
WIDTH = 100
LAZY = {"PreTrainedTokenizerFast": PreTrainedTokenizerFast}  # imported for types alone
COMMENT = (
    "A change of this file is a change of what users see: say it in CHANGELOG.md. "
    "Written by: python tests/test_surface.py --write"
)

Json = dict[str, Any]


# Python: types and signatures as text


def words_of(hint: Any) -> str:
    """A type as text, without modules; an internal class is "*"."""
    if hint is None or hint is NoneType:
        return "None"
    if hint is ...:
        return "..."
    if isinstance(hint, list):
        return f"[{', '.join(map(words_of, hint))}]"
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " | ".join(map(words_of, args))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if getattr(origin, "__module__", "").startswith("numpy"):
        return str(origin.__name__)  # what is inside is numpy's business
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(words_of, args))}]"
    return "*" if is_internal(hint) else getattr(hint, "__name__", str(hint))


def is_internal(kind: Any) -> bool:
    """Whether it is a class of Rayfin's that has no public name."""
    ours = inspect.isclass(kind) and kind.__module__.split(".")[0] == rayfin.__name__
    return ours and kind.__name__ not in (*rayfin.__all__, *data.__all__)


def internal_classes(hint: Any) -> list[type]:
    """Those that a type names, in order."""
    inner = hint if isinstance(hint, list) else get_args(hint)
    found = [kind for arg in inner for kind in internal_classes(arg)]
    return [hint, *found] if is_internal(hint) else found


def parameters(function: Callable[..., Any]) -> list[str]:
    """Each parameter's name, kind, type and default; what comes back is the last one."""
    signature = inspect.signature(function)
    hints = get_type_hints(function, localns=LAZY)
    made = {}
    if dataclasses.is_dataclass(function):
        made = {own.name: own.default_factory for own in dataclasses.fields(function)}
    elif inspect.isclass(function):
        hints = get_type_hints(function.__init__)
    entry = []
    for name, own in signature.parameters.items():
        text = name + (f": {words_of(hints[name])}" if name in hints else "")
        if own.default is not own.empty:
            factory = made.get(name, dataclasses.MISSING)
            value = own.default if factory is dataclasses.MISSING else factory()
            text += f" = {value!r}"
        if own.kind is not own.POSITIONAL_OR_KEYWORD:
            text += f" ({own.kind.description})"
        entry.append(text)
    if "return" in hints and not inspect.isclass(function):
        entry.append(f"-> {words_of(hints['return'])}")
    return entry


def methods(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public ones with their names; those of properties have no brackets."""
    for name, value in inspect.getmembers_static(kind):
        if name.startswith("_") and name not in ("__enter__", "__exit__"):
            continue
        if isinstance(value, property | functools.cached_property):
            function: Any = value.fget if isinstance(value, property) else value.func
            yield name, function
        elif callable(value) or isinstance(value, staticmethod | classmethod):
            yield f"{name}()", getattr(kind, name)


def members(kind: type) -> Json:
    """A public class: how it is made, its methods, and what is in what it gives back."""
    entry: Json = {"()": parameters(kind)} | insides(kind)
    for name, function in methods(kind):
        entry[name] = parameters(function)
        for inner in internal_classes(get_type_hints(function, localns=LAZY).get("return")):
            entry[f"the * of {name}"] = output(inner)
    return entry


def output(kind: type) -> Json:
    """An internal class that users get: its fields, or the methods of one that is no record."""
    if dataclasses.is_dataclass(kind):
        return {"fields": parameters(kind)} | insides(kind)
    return {name: parameters(function) for name, function in methods(kind)}


def insides(kind: type) -> Json:
    """The internal classes that fields hold."""
    hints = get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
    pairs = [(name, inner) for name, hint in hints.items() for inner in internal_classes(hint)]
    return {f"the * of {name}": output(inner) for name, inner in pairs}


def python() -> Json:
    """The names of ``import rayfin``; the keyword settings of ``LLM`` are an engine's."""
    entry: Json = {"names": sorted(rayfin.__all__)}
    for name in rayfin.__all__:
        value = getattr(rayfin, name)
        is_class = inspect.isclass(value)
        entry[name] = members(value) if is_class else type(value).__name__
    entry["rayfin.data"] = {"names": sorted(data.__all__)}
    for name in data.__all__:
        entry["rayfin.data"][name] = data_member(getattr(data, name))
    entry["rayfin.rollouts"] = {"names": sorted(rollouts.__all__)}
    entry["rayfin.rollouts"]["put"] = str(inspect.signature(rollouts.put))
    entry["rayfin.llm"] = {"names": sorted(llm.__all__)}
    for name in llm.__all__:
        if inspect.isclass(value := getattr(llm, name)):
            entry["rayfin.llm"][name] = data_member(value)
    entry["settings of LLM()"] = sorted(own.name for own in dataclasses.fields(EngineArgs))
    return entry


def data_member(value: Any) -> Any:
    """A function, a class, or the fields of a configuration of Ray's."""
    if inspect.isclass(value) and issubclass(value, BaseModel):
        return sorted(value.model_fields)
    return members(value) if inspect.isclass(value) else parameters(value)


# The command line


def command_line() -> Json:
    """Every command by its words, with its arguments in order and its options by their flags."""

    def walk(command: click.Command, words: str) -> Iterator[tuple[str, Json]]:
        entry: Json = {"arguments": [], "options": {}}
        for own in command.params:
            if isinstance(own, click.Option):
                entry["options"][" ".join([*own.opts, *own.secondary_opts])] = parameter(own)
            else:
                entry["arguments"].append([own.human_readable_name, parameter(own)])
        yield words, entry
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                yield from walk(inner, f"{words} {name}")

    return dict(walk(cli, "rayfin"))


def parameter(own: click.Parameter) -> Json:
    """What is said of it that is no help; what is as usual is left out."""
    kind: Any = own.type
    entry = own.to_info_dict()
    text = kind.name
    if isinstance(kind, click.Choice):
        text = "|".join(kind.choices)
    elif hasattr(kind, "min"):
        left, right = "(" if kind.min_open else "[", ")" if kind.max_open else "]"
        text += f" {left}{kind.min}, {kind.max}{right}"
    switches = ("required", "multiple", "count", "hidden", "is_flag")
    usual = dict.fromkeys(switches, False) | {"nargs": 1, "default": None, "envvar": None}
    facts = {name: entry[name] for name, value in usual.items() if entry.get(name, value) != value}
    return {"type": text, **facts}


# HTTP


def routes(app: FastAPI) -> list[str]:
    """Methods and path of each."""
    all_routes = iter_route_contexts(app.routes)
    found = [(own.path, method) for own in all_routes for method in own.methods or ()]
    return [f"{method} {path}" for path, method in sorted(found)]


def plain(schema: Any, schemas: Json, above: tuple[str, ...] = ()) -> Any:
    """A JSON schema without its words and without names of classes: references are followed."""
    if not isinstance(schema, dict):
        return schema
    if (reference := schema.get("$ref")) is not None:
        name = reference.removeprefix("#/components/schemas/")
        if name in above:
            return f"as {len(above) - above.index(name)} above"
        others = {key: value for key, value in schema.items() if key != "$ref"}
        return plain(schemas[name] | others, schemas, (*above, name))
    entry: Json = {}
    for key, value in schema.items():
        if key in ("title", "description", "examples", "discriminator"):
            continue
        if key in ("properties", "patternProperties"):
            value = {name: plain(own, schemas, above) for name, own in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            value = [plain(own, schemas, above) for own in value]
        elif key in ("items", "additionalProperties", "not", "contains"):
            value = plain(value, schemas, above)
        entry[key] = sorted(value) if key == "required" else value
    return entry


def described(document: Json) -> Json:
    """An OpenAPI document by routes; bodies of failures that are all alike are listed once."""
    schemas = document["components"]["schemas"]

    def bodies(own: Json) -> Json:
        content = own.get("content", {})
        return {kind: plain(value.get("schema"), schemas) for kind, value in content.items()}

    entry: Json = {}
    failures: list[Json] = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = {status: bodies(own) for status, own in operation["responses"].items()}
            failed = sorted(status for status in answers if status >= "400")
            for status in failed:
                if answers[status] not in failures:
                    failures.append(answers[status])
            entry[f"{method.upper()} {path}"] = {
                "parameters": [
                    [own["name"], own["in"], own["required"], plain(own["schema"], schemas)]
                    for own in operation.get("parameters", ())
                ],
                "body": bodies(operation.get("requestBody", {})),
                "answers": {s: own for s, own in answers.items() if s not in failed},
                "failures": " ".join(failed),
            }
    return {"routes": entry, "bodies of failures": failures}


SAYS = {"max_tokens": 4, "seed": 1}
TALK = {"messages": [{"role": "user", "content": "hello"}], **SAYS}
IDS = {"return_token_ids": True, **SAYS}
LONG = {"max_output_tokens": 16}
STREAMED = {"stream_options": {"include_usage": True}, "stream": True}
GETS = (
    "/ /health /live /ping /load /version /metrics /docs /ui /ui/state /admin/engines /is_sleeping "
    "/v1/models /v1/models/tiny /v1/responses/none /v1/completions /v1/other"
)
ASKED: tuple[tuple[str, Json | None], ...] = (
    *((f"GET {path}", None) for path in GETS.split()),
    ("POST /admin/drain?engine=none", None),
    ("POST /tokenize", {"prompt": "hello", "return_token_strs": True}),
    ("POST /detokenize", {"tokens": [5, 6]}),
    ("POST /v1/completions", {"prompt": "hello", **SAYS}),
    ("POST /v1/completions", {"logprobs": 1, "prompt_logprobs": 1, "prompt": "hello", **IDS}),
    ("POST /v1/completions", {"prompt": "hello", **STREAMED, **SAYS}),
    ("POST /v1/chat/completions", TALK),
    ("POST /v1/chat/completions", {"logprobs": True, "top_logprobs": 1, **TALK, **IDS}),
    ("POST /v1/chat/completions", {**STREAMED, **TALK}),
    ("POST /invocations", TALK),
    ("POST /v1/responses", {"input": "hello", **LONG}),
    ("POST /v1/responses", {"input": "hello", "stream": True, **LONG}),
    ("POST /v1/responses/input_tokens", {"input": "hello"}),
    ("POST /v1/messages", {"model": "tiny", **TALK, "seed": None}),
    ("POST /v1/messages", {"model": "tiny", **TALK, "seed": None, "stream": True}),
    ("POST /v1/messages/count_tokens", {"model": "tiny", "messages": TALK["messages"]}),
    ("POST /v1/messages", {"model": "other", **TALK, "seed": None}),
    ("POST /v1/completions", {"prompt": "hello", "n": 0}),
    ("POST /v1/completions", {"prompt": "hello", "model": "other"}),
    ("POST /v1/completions", {"prompt": "hello", "of_nobody": 1, **SAYS}),
)
"""Examples whose answers are listed: of streams, and of routes that OpenAPI has no body for."""


def shape(value: Any, name: str = "") -> Any:
    """Names and types of an answer; the words that say what something is stay."""
    if isinstance(value, dict):
        return {key: shape(own, key) for key, own in value.items()}
    if isinstance(value, list):
        found: list[Any] = []
        for own in value:
            if (kind := shape(own, name)) not in found:
                found.append(kind)
        return found
    if isinstance(value, str) and name in ("type", "object", "code", "status", "finish_reason"):
        return f"'{value}'"
    kinds = {NoneType: "null", bool: "boolean", str: "string", int: "number", float: "number"}
    return kinds[type(value)]


def answer(response: httpx.Response) -> Json:
    """Its status, its headers and the shape of its body; of a stream, the kinds of events."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    entry: Json = {
        "status": response.status_code,
        "headers": " ".join(sorted(response.headers)),
    }
    if kind == "application/json":
        entry["body"] = shape(response.json())
    elif kind == "text/event-stream":
        entry["events"] = []
        for text in response.text.split("\n\n"):
            lines = [line.partition(": ") for line in text.splitlines() if text[0] != ":"]
            event = {name: told_in_event(name, value) for name, _, value in lines}
            if event and event not in entry["events"]:
                entry["events"].append(event)
    elif kind:
        entry["type"] = kind
    return entry


def told_in_event(name: str, value: str) -> Any:
    """Of a line of an event: data's shape, and words that say what it is."""
    if name == "data" and value.startswith("{"):
        return shape(json.loads(value))
    return "string" if name == "id" else value


async def ask(app: FastAPI, asked: Any) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"Authorization": "Bearer admin"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://rayfin", headers=headers
    ) as http:
        return [await http.request(*words.split(), json=body) for words, body in asked]


def stats() -> EngineStats:
    """Of an engine that has done nothing yet."""
    histograms = EngineCounters(4096).snapshot().histograms
    stats = EngineStats(incarnation="one", pages_total=1, page_size=16, histograms=histograms)
    stats.cache_config = tuple(CACHE_LABELS)
    stats.plugin_seconds["module:Class"] = 0
    return stats


def service() -> OpenAIService:
    """A model behind a fake engine."""
    tokenizer = Tokenizer.load(str(DEMO_FOLDER))
    engine = runpy.run_path(str(FAKES))["FakeEngine"](tokenizer)
    engine.reports = [EngineReport.of("0", "app/engine/0", stats())]
    return OpenAIService(engine, tokenizer, ["tiny"], engine.limits.max_model_len)


def http() -> Json:
    """Routes of the API and of the operators' port, bodies as described, and answers to examples.

    The answers are of an API where everything is on: its documentation, and operators' routes.
    """
    served, keys = service(), ApiKeys.load(["admin"])
    assert keys is not None
    usual = routes(build_api(served))
    served.edge.admin_keys, served.edge.docs = keys, True
    app = build_api(served)
    port = build_admin_api([Operated(served.model_names, served.client)], keys)
    (document,) = asyncio.run(ask(app, [("GET /openapi.json", None)]))
    answers = zip(ASKED, asyncio.run(ask(app, ASKED)), strict=True)
    return {
        "routes": {
            "of the API": usual,
            "with --enable-docs and --admin-api-key": [o for o in routes(app) if o not in usual],
            "of the operators' port": routes(port),
        },
        "described": described(document.json()),
        "answers": {
            f"{words} {'' if body is None else json.dumps(body)}".strip(): answer(entry)
            for (words, body), entry in answers
        },
        "codes of refusals": HTTP_CODES,
        "types of refusals, Anthropic's": TYPES,
    }


# Metrics


def metrics() -> Json:
    """The series, as they are rendered; a label that has a closed set of values has them listed."""
    ledger = Ledger()
    ledger.apply(engine_report("0", stats(), 0.0), 0.0)
    ledger.apply(IngressCounters().report(), 0.0)
    declared = (*ENGINE_METRICS, *INGRESS_METRICS)
    own, both = (
        series(render("tiny", alias, ledger, declared).decode()) for alias in (None, "vllm")
    )
    assert own.items() <= both.items()
    alias = {name: entry for name, entry in both.items() if name not in own}
    return {"always": own, "with --metrics-alias vllm": alias}


def series(text: str) -> Json:
    """By name: type, labels with their values, and buckets."""
    found: Json = {}
    for family in text_string_to_metric_families(text):
        assert family.samples, f"{family.name} has no series"
        labels: dict[str, list[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                values = labels.setdefault(label, [])
                if value not in values:
                    values.append(value)
        entry: Json = {"type": family.type, "buckets": " ".join(labels.pop("le", ()))}
        entry["labels"] = {label: " ".join(values) for label, values in labels.items()}
        name = family.samples[0].name.removesuffix("_bucket")
        found[name] = {key: value for key, value in entry.items() if value}
    return found


# Environment, configurations, packages


def environment() -> list[str]:
    """The variables of our own that the product's code names, wherever it is."""
    (package,) = (Path(own) for own in rayfin.__path__)
    files = {path.resolve() for path in package.glob("*.py")}
    for folder in filter(Path.is_dir, package.iterdir()):
        files |= set(folder.resolve().rglob("*.py"))
    return sorted(
        {
            node.value
            for path in files
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if re.fullmatch(r"RAYFIN_[A-Z_]+", node.value)
        }
    )


def import_paths() -> dict[str, list[str]]:
    """What the documents tell users to write into their configurations."""
    patterns = {
        "import_path": r"\bimport_path:\s*(\S+)",
        CALLBACK: rf"\b{CALLBACK}(?:=|\s+value:\s*)(\S+)",
    }
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("k8s/**/*.yaml"), *ROOT.glob("examples/*.yaml")]
    texts = [page.read_text() for page in pages]
    found = {name: set(re.findall(own, "\n".join(texts))) for name, own in patterns.items()}
    found[CALLBACK].add(CALLBACK_PATH)
    return {name: sorted(paths) for name, paths in found.items()}


def settings(kind: type[BaseModel]) -> Json:
    """The keys of a model of pydantic's; one that holds other models tells theirs."""
    entry: Json = {"others": kind.model_config.get("extra", "ignore"), "keys": {}}
    for name, own in kind.model_fields.items():
        default = "" if own.is_required() else f" = {own.get_default(call_default_factory=True)!r}"
        entry["keys"][name] = words_of(own.annotation) + default
        for inner in internal_classes(own.annotation):
            entry[f"the * of {name}"] = settings(inner)
    return entry


def configurations() -> Json:
    """Of a Serve config: the paths that it imports, and the keys below ``args:``."""
    return {"paths": import_paths(), "args": settings(get_type_hints(build_app)["args"])}


def package() -> Json:
    """What ``pip install`` gives."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {
        "name": project["name"],
        "extras": sorted(project["optional-dependencies"]),
        "python": project["requires-python"],
        "scripts": sorted(project["scripts"]),
    }


# Failures


def failures() -> Json:
    """HTTP status and type of each code that an error of ours has."""
    kinds = [own for own in vars(errors).values() if inspect.isclass(own)]
    entry: dict[str, list[Json]] = {}
    for kind in kinds:
        if issubclass(kind, errors.RayfinError):
            facts = {"status": kind.status, "type": kind.type}
            if facts not in entry.setdefault(kind.code, []):
                entry[kind.code].append(facts)
    return entry


def failpoint_words() -> Json:
    """The words of RAYFIN_FAILPOINTS."""
    points, actions = sorted(failpoints.POINTS), sorted(failpoints.ACTIONS)
    return {"points": points, "actions": actions, "conditions": sorted(failpoints.CONDITIONS)}


PARTS: dict[str, Callable[[], Any]] = {
    own.__name__.replace("_", " "): own
    for own in (command_line, configurations, environment, failpoint_words, failures)
    + (http, metrics, package, python)
}


# The list


def pretty(value: Any, used: int = 0, indent: int = 0) -> str:
    """JSON with sorted keys, on one line where it fits beside the ``used`` columns."""
    flat = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if used + len(flat) < WIDTH or not value or not isinstance(value, dict | list):
        return flat
    inner = indent + 1
    if isinstance(value, list):
        lines, ends = [pretty(own, inner, inner) for own in value], "[]"
    else:
        heads = {json.dumps(key, ensure_ascii=False) + ": ": value[key] for key in sorted(value)}
        lines = [head + pretty(own, inner + len(head), inner) for head, own in heads.items()]
        ends = "{}"
    pad = " " * inner
    return ends[0] + "\n" + ",\n".join(pad + line for line in lines) + f"\n{' ' * indent}{ends[1]}"


def as_json(value: Any) -> Any:
    """As it is after it was written and read."""
    return json.loads(json.dumps(value))


def written() -> Json:
    entry: Json = json.loads(LIST.read_text())
    return entry


@pytest.mark.parametrize("part", PARTS)
def test_users_see_what_is_listed(part: str) -> None:
    listed, found = pretty(written()[part]), pretty(as_json(PARTS[part]()))
    changes = difflib.unified_diff(listed.splitlines(), found.splitlines(), "listed", "found", n=2)
    if listed != found:  # pytest's own comparison of long texts takes seconds
        pytest.fail("\n".join([COMMENT, *changes]), pytrace=False)


def test_what_configurations_import_is_there() -> None:
    """As Serve imports it: module:name, or module.name."""
    for path in sum(written()["configurations"]["paths"].values(), []):
        module, _, name = path.rpartition(":" if ":" in path else ".")
        assert callable(getattr(importlib.import_module(module), name)), path


def test_the_list_is_as_it_is_written() -> None:
    entry = written()
    assert entry.keys() == {"", *PARTS} and LIST.read_text() == pretty(entry) + "\n"


def test_names_of_schemas_are_no_part_of_it() -> None:
    """Nor is a word of help; a property that is called like one of them is."""

    def schemas(name: str, words: str) -> Json:
        inner = {"title": {"type": "string", "title": words}, "next": {"$ref": name}}
        return {name: {"type": "object", "properties": inner, "description": words}}

    found = [plain({"$ref": name}, schemas(name, name.lower())) for name in ("Old", "New")]
    assert found[0] == found[1]
    assert found[0]["properties"] == {"title": {"type": "string"}, "next": "as 1 above"}


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    parts = {name: own() for name, own in PARTS.items()}
    LIST.write_text(pretty(as_json({"": COMMENT, **parts})) + "\n")
