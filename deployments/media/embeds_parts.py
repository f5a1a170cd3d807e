"""Parts of chat messages that are embeddings: ``{"type": "prompt_embeds", "data": base64}``.

They take the places that the chat template gives them. The form is vLLM's.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.part import PromptEmbeds
from rayfin.actors.messages import EngineInfo
from rayfin.deployments.media.embeds_tensor import FIELD, Tensor
from rayfin.deployments.media.read_embeds import HOW, EmbedsReader, required
from rayfin.deployments.text.markers import FIRST_PLACE, Marked

MAX_PARTS = 256  # of a conversation


async def read_parts(
    marked: Marked, reader: EmbedsReader | None, info: EngineInfo
) -> list[PromptEmbeds]:
    """As ``read_parts_now``, in one of the reader's threads."""
    param = f"{marked.parts[0].path}.data"
    work = partial(read_parts_now, marked, reader, info)
    return await required(reader, info, param).in_thread(work)


def read_parts_now(
    marked: Marked,
    reader: EmbedsReader | None,
    info: EngineInfo,
    tensor_of: Callable[[Any], Tensor] | None = None,
) -> list[PromptEmbeds]:
    """The embeddings of a conversation's parts, read one after another.

    Args:
        reader: None if the model takes none.
        tensor_of: of a value that is no text, for ``LLM``.

    Raises:
        InvalidRequest: ``param`` is the path of what is wrong, such as
            messages[0].content[1].data.
    """
    embeds: list[PromptEmbeds] = []
    rows = 0
    for number, part in enumerate(marked.parts):
        path, value = f"{part.path}.data", part.part.get("data")
        reading = required(reader, info, path)
        if number >= MAX_PARTS:
            raise InvalidRequest(
                f"A conversation has at most {MAX_PARTS} parts of type {FIELD}.",
                part.path,
                "array_above_max_length",
            )
        if isinstance(value, str) and value:
            embeds.append(reading.read_now(value, path, info, before=rows))
        elif tensor_of is not None and value is not None:
            embeds.append(reading.take(_tensor(tensor_of, value, path), path, info, before=rows))
        else:
            raise InvalidRequest(f"'{path}' must be {HOW}.", path, "invalid_type")
        rows += embeds[-1].sent.length
    return embeds


def place_embeds(
    ids: Sequence[int], read: Sequence[PromptEmbeds]
) -> tuple[list[int], tuple[PromptEmbeds, ...]]:
    """Puts the embeddings where the ids of a conversation have their parts; their ids are 0.

    Raises:
        InvalidRequest: the template has left a part out, or shows it twice.
    """
    places = sorted(FIRST_PLACE - token for token in ids if token < 0)
    if places != list(range(len(read))):
        raise InvalidRequest(
            f"The chat template does not show each part of type {FIELD} once: it has places for "
            f"{len(places)}, and {len(read)} are given.",
            "messages",
            "unsupported_content",
        )
    whole: list[int] = []
    placed: list[PromptEmbeds] = []
    for token in ids:
        if token >= 0:
            whole.append(token)
            continue
        embeds = read[FIRST_PLACE - token].at(len(whole))
        placed.append(embeds)
        whole += [0] * embeds.sent.length
    return whole, tuple(placed)


def _tensor(tensor_of: Callable[[Any], Tensor], value: object, path: str) -> Tensor:
    try:
        return tensor_of(value)
    except InvalidRequest as error:
        raise InvalidRequest(error.message.replace(FIELD, path, 1), path, error.code) from None
