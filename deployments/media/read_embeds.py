"""The embeddings of a request: base64 of a file, to rows that a runner can take.

Sizes are checked before anything is decoded, and the shape before anything is copied.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, deserialize

from rayfin.actors.errors import ContextLengthExceeded, InvalidRequest
from rayfin.actors.media.part import ROWS, EmbedsFacts, EmbedsInput, PromptEmbeds
from rayfin.actors.media.virtual_ids import row_ids
from rayfin.actors.messages import EngineInfo
from rayfin.deployments.media.embeds_tensor import DTYPES, FIELD, Tensor, refused
from rayfin.deployments.media.torch_file import read_torch
from rayfin.deployments.text.checks import from_base64, size_of_base64

THREADS = 2  # for all requests of a replica
FRAME_BYTES = 64 * 1024  # of a file beside its numbers
ZIP = b"PK\x03\x04"
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HOW = "base64 of one tensor, as torch.save or safetensors writes it"

T = TypeVar("T")


class EmbedsReader:
    """Reads ``prompt_embeds``, in threads.

    Args:
        put: brings the rows into Ray's object store; None leaves them in the request.
    """

    def __init__(self, put: Callable[[Any], Any] | None = None) -> None:
        self._put = put
        self._threads = ThreadPoolExecutor(THREADS, "embeds")

    async def read(
        self,
        data: str,
        param: str,
        info: EngineInfo,
        cut: Callable[[list[int]], list[int]] = lambda places: places,
    ) -> PromptEmbeds:
        """The embeddings of one prompt.

        Args:
            param: their field, for errors.
            cut: which of the rows, by their places, to keep.

        Raises:
            InvalidRequest: they are not what this model takes; ``param`` says where.
        """
        return await self.in_thread(partial(self.read_now, data, param, info, cut))

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs ``work`` in one of the reader's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def read_now(
        self,
        data: str,
        param: str,
        info: EngineInfo,
        cut: Callable[[list[int]], list[int]] = lambda places: places,
        before: int = 0,
    ) -> PromptEmbeds:
        """As ``read``, in the caller's thread.

        Args:
            before: rows of the prompt's earlier embeddings.
        """
        try:
            tensor = _decoded(data, info)
        except InvalidRequest as error:
            message = error.message.replace(FIELD, param, 1)
            raise InvalidRequest(message, param, error.code) from None
        shaped = _shaped(tensor, param, info, before)
        if _repeats(shaped.array):  # a list of such would copy to many times what came
            raise InvalidRequest(
                f"'{param}' repeats its numbers by its strides; send tensor.clone().",
                param,
                "invalid_embeds",
            )
        return self.take(shaped, param, info, cut, before)

    def take(
        self,
        tensor: Tensor,
        param: str,
        info: EngineInfo,
        cut: Callable[[list[int]], list[int]] = lambda places: places,
        before: int = 0,
    ) -> PromptEmbeds:
        """The same from a tensor.

        Raises:
            InvalidRequest: its shape or a number is wrong.
        """
        whole = _shaped(tensor, param, info, before)
        kept = cut(list(range(len(whole.array))))
        whole = Tensor(whole.array[kept[0] : kept[-1] + 1], whole.dtype).narrowed()
        rows = Tensor(np.ascontiguousarray(whole.array), whole.dtype)
        if not rows.is_finite():
            raise InvalidRequest(
                f"'{param}' has numbers that are no finite ones.", param, "invalid_embeds"
            )
        given: Any = {ROWS: rows.array}
        if self._put is not None:
            given = self._put(given)
        sent = EmbedsInput(given, len(rows.array), rows.dtype)
        return PromptEmbeds(row_ids(rows.array, rows.dtype), sent)


def required(reader: EmbedsReader | None, info: EngineInfo, param: str) -> EmbedsReader:
    """The reader of a model that takes embeddings.

    Raises:
        InvalidRequest: it takes none.
    """
    if reader is None or info.part(EmbedsFacts) is None:
        raise InvalidRequest(
            f"{param} needs a server that was started with --enable-prompt-embeds.",
            param,
            "unsupported_parameter",
        )
    return reader


def embeds_size(info: EngineInfo) -> int:
    """Numbers of each embedding; 0 if prompts are tokens."""
    facts = info.part(EmbedsFacts)
    return 0 if facts is None else facts.size


def listed(value: object, limit: int) -> list[tuple[str, str]]:
    """The field's texts, one or a list, each behind its path.

    Raises:
        InvalidRequest: it is something else, empty, or has more than ``limit``.
    """
    single = isinstance(value, str)
    texts: Sequence[Any] = [value] if single else value if isinstance(value, list) else [None]
    if len(texts) > limit:
        raise InvalidRequest(
            f"'{FIELD}' takes at most {limit} prompts, got {len(texts)}.",
            FIELD,
            "array_above_max_length",
        )
    embeds = []
    for i, text in enumerate(texts):
        path = FIELD if single or not isinstance(value, list) else f"{FIELD}[{i}]"
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"'{path}' must be {HOW}.", path, "invalid_type")
        embeds.append((path, text))
    return embeds


def _decoded(data: str, info: EngineInfo) -> Tensor:
    size = embeds_size(info)
    max_bytes = info.max_model_len * size * DTYPES["float64"].itemsize + FRAME_BYTES
    if size_of_base64(data) > max_bytes:
        raise refused(
            f"it has {len(data)} characters, more than {info.max_model_len} tokens of "
            f"{size} numbers take"
        )
    try:
        raw = from_base64(data)
    except ValueError:
        raise refused(f"it is not {HOW}") from None
    return read_torch(raw) if raw.startswith(ZIP) else _read_safetensors(raw)


def _read_safetensors(raw: bytes) -> Tensor:
    parse: Any = deserialize  # it has no types
    try:
        tensors = parse(raw)
    except (SafetensorError, ValueError, OverflowError):
        raise refused(f"it is not {HOW}") from None
    if len(tensors) != 1:
        raise refused(f"it has {len(tensors)} tensors instead of one")
    ((_, tensor),) = tensors
    dtype = SAFETENSORS.get(tensor["dtype"])
    if dtype is None:
        raise refused(f"{tensor['dtype']} is not of {', '.join(DTYPES)}")
    numbers = np.frombuffer(tensor["data"], DTYPES[dtype])
    return Tensor(numbers.reshape(tensor["shape"]), dtype)


def _repeats(array: np.ndarray) -> bool:
    """Whether places of an array share numbers; its strides are not negative."""
    sizes = zip(array.shape, array.strides, strict=True)
    reach = sum((count - 1) * step for count, step in sizes) + array.itemsize
    return bool(reach < array.nbytes)


def _shaped(tensor: Tensor, param: str, info: EngineInfo, before: int) -> Tensor:
    """The tensor as [tokens, hidden]; nothing of it is copied."""
    array = tensor.array
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    size = embeds_size(info)
    if array.ndim != 2 or array.shape[1] != size or not len(array):
        raise InvalidRequest(
            f"'{param}' has the shape {tensor.array.shape}; it must be (tokens, "
            f"{size}), with the hidden size of this model.",
            param,
            "invalid_embeds",
        )
    if before + len(array) > info.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {info.max_model_len} tokens, however the "
            f"prompt is too long: it has {before + len(array)} embeddings. Please shorten it.",
            param,
        )
    return Tensor(array, tensor.dtype)
