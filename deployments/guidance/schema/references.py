"""Where the references of a schema document lead, and the shapes of all of its keywords.

No socket and no file is opened: what is not in the document is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.schema.keywords import (
    DRAFTS,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    SCHEMAS,
    check_shape,
    short,
)
from rayfin.deployments.guidance.schema.lint import (
    MAX_DEFINITIONS,
    MAX_PROPERTIES,
    MAX_VALUES,
    check_count,
    invalid_schema,
)

Pointer = tuple[str | int, ...]


class References:
    """A document whose shapes are checked, and the target of each ``$ref`` in it.

    Args:
        root: a schema. It is not changed.
        path: of the schema in the request, for errors.

    Raises:
        InvalidRequest: ``invalid_schema``, ``unsupported_schema`` or ``schema_too_complex``.
    """

    def __init__(self, root: Any, path: str) -> None:
        self._root = root
        self._path = path
        self.draft = _draft(root.get("$schema")) if isinstance(root, Mapping) else 2020
        self.targets: dict[Pointer, Pointer] = {}  # of the object that has the $ref
        self._bases: dict[Pointer, str] = {}  # of each schema that was visited
        self._resources: dict[str, Pointer] = {"": ()}
        self._anchors: dict[tuple[str, str], Pointer] = {}
        self._definitions = 0
        self._unresolved: list[tuple[Pointer, str]] = []
        self._visit((), "")
        while self._unresolved:
            at, reference = self._unresolved.pop()
            target = self._resolve(reference, at)
            self.targets[at] = target
            if target not in self._bases:  # below a keyword that holds no schemas
                self._visit(target, self._bases[()])

    def value(self, at: Pointer) -> Any:
        value = self._root
        for step in at:
            value = value[step]
        return value

    def path(self, at: Pointer) -> str:
        """The path of a value of the document in the request."""
        steps = (f"[{s}]" if isinstance(s, int) else f".{short(s)}" for s in at)
        return self._path + "".join(steps)

    def _visit(self, start: Pointer, base: str) -> None:
        """Checks shapes, and notes identifiers, anchors and references of all schemas below."""
        waiting = [(start, self.value(start), base)]
        while waiting:
            at, schema, base = waiting.pop()
            if at in self._bases:
                continue
            if isinstance(schema, Mapping):
                base = self._identify(schema, at, base)
                self._check(schema, at)
                waiting.extend((inner, value, base) for inner, value in children(schema, at))
            self._bases[at] = base

    def _identify(self, schema: Mapping[str, Any], at: Pointer, base: str) -> str:
        """Notes what names the schema; returns the base of the references in it."""
        old = self.draft <= 7
        name = schema.get("id" if self.draft == 4 else "$id")
        if isinstance(name, str) and not (old and "$ref" in schema):
            if old and name.startswith("#"):
                self._anchors[base, name[1:]] = at
            else:
                base = self._join(base, name, at).partition("#")[0]
                self._resources[base] = at
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = schema.get(keyword)
            if isinstance(anchor, str):
                self._anchors[base, anchor] = at
        return base

    def _check(self, schema: Mapping[str, Any], at: Pointer) -> None:
        path = self.path(at)
        for keyword, value in schema.items():
            inner = f"{path}.{short(keyword)}"
            check_shape(keyword, value, inner)
            if keyword in ("properties", "patternProperties"):
                check_count(len(value), MAX_PROPERTIES, "properties", inner)
            elif keyword == "enum":
                check_count(len(value), MAX_VALUES, "values", inner)
            elif keyword in ("$defs", "definitions"):
                self._definitions += len(value)
                check_count(self._definitions, MAX_DEFINITIONS, "definitions", inner)
            elif keyword == "$ref":
                self._unresolved.append((at, value))
            elif keyword == "$schema" and at and _draft(value) != self.draft:
                raise InvalidRequest(
                    f"{inner} names another draft than the schema around it.",
                    inner,
                    "unsupported_schema",
                )

    def _resolve(self, reference: str, at: Pointer) -> Pointer:
        path = f"{self.path(at)}.$ref"
        base = self._bases[at]
        if reference.startswith("#"):
            url, fragment = base, reference[1:]
        else:
            url, _, fragment = self._join(base, reference, at).partition("#")
        start = self._resources.get(url)
        if start is None:
            raise invalid_schema(
                f"{path} names {reference[:100]!r}, which is not in the schema.", path
            )
        fragment = unquote(fragment)
        if not fragment.startswith("/"):
            target = self._anchors.get((url, fragment)) if fragment else start
        else:
            target = self._follow(start, fragment)
        if target is None or not isinstance(self.value(target), Mapping | bool):
            raise invalid_schema(f"{path} names {reference[:100]!r}, which is no schema.", path)
        return target

    def _follow(self, start: Pointer, fragment: str) -> Pointer | None:
        """A JSON pointer, from a schema on; None if there is nothing."""
        at = start
        value = self.value(start)
        for part in fragment[1:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, Mapping) and name in value:
                at, value = (*at, name), value[name]
            elif isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
                at, value = (*at, int(name)), value[int(name)]
            else:
                return None
        return at

    def _join(self, base: str, url: str, at: Pointer) -> str:
        try:
            return urljoin(base, url)
        except ValueError as e:
            path = self.path(at)
            raise invalid_schema(f"{path} names {url[:100]!r}: {e}.", path) from None


def children(schema: Mapping[str, Any], at: Pointer) -> Iterator[tuple[Pointer, Any]]:
    """The schemas within a schema whose shapes are checked."""
    for keyword, value in schema.items():
        here = (*at, keyword)
        if keyword in SCHEMAS and isinstance(value, Mapping | bool):
            yield here, value
        elif keyword in SCHEMA_LISTS or (keyword == "items" and isinstance(value, list | tuple)):
            yield from (((*here, i), inner) for i, inner in enumerate(value))
        elif keyword in SCHEMA_MAPS or keyword == "dependencies":
            for name, inner in value.items():
                if isinstance(inner, Mapping | bool):
                    yield (*here, name), inner


def _draft(name: Any) -> int:
    if not isinstance(name, str):
        return 2020
    return DRAFTS.get(name.partition("://")[2].removesuffix("#"), 2020)
