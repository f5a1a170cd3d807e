"""Checks a batch's whole input before anything of it runs: OpenAI's rule."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.batches.lines import MESSAGES, Line, LineReader, id_hash, parse_line
from rayfin.deployments.batches.objects import MAX_ERRORS
from rayfin.deployments.http.anthropic_errors import CLAUDE

CHECK_EVERY = 1000
"""Lines between two questions whether to go on."""


def validate(
    path: Path,
    endpoint: str,
    serves: Callable[[str], bool],
    max_lines: int,
    abandoned: Callable[[], bool] = lambda: False,
) -> tuple[int, list[dict[str, Any]]] | None:
    """Returns the number of lines, and OpenAI's errors of bad ones, ``MAX_ERRORS`` at most.

    Returns None when ``abandoned`` says that the batch is cancelled.

    Args:
        serves: whether a model of that name is served; a line may name none.
    """
    seen: set[bytes] = set()
    errors: list[dict[str, Any]] = []
    total = 0
    with path.open("rb") as file:
        for number, data in LineReader(file):
            total += 1
            if total % CHECK_EVERY == 0 and abandoned():
                return None
            if total > max_lines:
                error = InvalidRequest(
                    f"The file has more than {max_lines} lines.", None, "too_many_lines"
                )
                return total, [_shown(error, None)]
            try:
                line = parse_line(number, data)
                _check(line, endpoint, serves)
                key = id_hash(line.custom_id)
                if key in seen:
                    raise InvalidRequest(
                        f"An earlier line has the custom_id {line.custom_id[:64]!r}.",
                        "custom_id",
                        "duplicate_custom_id",
                    )
                seen.add(key)
            except InvalidRequest as error:
                errors.append(_shown(error, number))
                if len(errors) == MAX_ERRORS:
                    return total, errors
    if not total:
        errors.append(_shown(InvalidRequest("The file has no line.", None, "empty_file"), None))
    return total, errors


def _check(line: Line, endpoint: str, serves: Callable[[str], bool]) -> None:
    if line.url != endpoint:
        raise InvalidRequest(
            f"url is {line.url}, and the batch's endpoint {endpoint}.", "url", "mismatched_url"
        )
    model = line.body.get("model")
    if line.url == MESSAGES and isinstance(model, str) and model.startswith(CLAUDE):
        return
    if model is not None and not (isinstance(model, str) and serves(model)):
        raise InvalidRequest(
            f"The model {str(model)[:128]!r} does not exist.", "body.model", "model_not_found"
        )


def _shown(error: InvalidRequest, number: int | None) -> dict[str, Any]:
    return {"code": error.code, "line": number, "message": error.message, "param": error.param}
