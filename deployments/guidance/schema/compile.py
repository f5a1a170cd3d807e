"""From a JSON schema to one that llguidance enforces completely, or an error with its path."""

from dataclasses import dataclass
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.guidance.schema.emit import Emitter
from rayfin.deployments.guidance.schema.keywords import check_shape
from rayfin.deployments.guidance.schema.lint import MAX_BYTES, check_document
from rayfin.deployments.guidance.schema.nodes import Nothing
from rayfin.deployments.guidance.schema.prune import Pruner
from rayfin.deployments.guidance.schema.references import References
from rayfin.deployments.guidance.schema.rewrite import Rewriter


@dataclass(slots=True, frozen=True)
class CompiledSchema:
    """A schema of the dialect that llguidance enforces."""

    schema: dict[str, Any]
    plain_names: bool  # False: names must not be written with ``\\u``, else a name has two forms
    unenforced: tuple[str, ...]  # paths of keywords


def compile_schema(
    schema: Any,
    path: str,
    *,
    strict: bool = True,
    closed: bool = False,
    max_bytes: int = MAX_BYTES,
) -> CompiledSchema:
    """Returns a schema with the same values, as far as they can be enforced.

    Args:
        schema: an object, or true for any value.
        path: of the schema in the request, for errors.
        strict: False leaves out keywords that cannot be enforced and only narrow.
        closed: objects with ``properties`` and without ``additionalProperties`` take no others.

    Raises:
        InvalidRequest: ``invalid_schema``, ``unsupported_schema``, ``unsatisfiable_schema`` or
            ``schema_too_complex``; ``param`` is the path of the keyword.
    """
    check_document(schema, path, max_bytes)
    check_shape("not", schema, path)  # an object or a boolean
    rewriter = Rewriter(References(schema, path), strict=strict, closed=closed)
    root = rewriter.rewrite()
    pruner = Pruner(rewriter.definitions, rewriter.patterns)
    pruned = pruner.prune(root)
    if isinstance(pruned, Nothing):
        raise InvalidRequest(
            f"{pruned.path} lets no value be valid: {pruned.reason}.",
            pruned.path,
            "unsatisfiable_schema",
        )
    emitter = Emitter(pruner.definitions, rewriter.patterns, rewriter.drop)
    emitted = emitter.emit(pruned)
    return CompiledSchema(emitted, emitter.plain_names, tuple(dict.fromkeys(rewriter.unenforced)))
