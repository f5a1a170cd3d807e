"""A trainer's tensors as objects of Ray: each program of it puts its own, none waits for another.

    trainer   put(named_parameters) ─► ref, ref, ...   a flat array of bytes, and what lies where
    caller    update_weights(refs)  ─► one after the other into the version's file

Ray maps the bytes of a bucket that is on this node, and fetches the others. A bucket is freed once
it is written and no program has its ref.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.timing import WEIGHTS_BUCKET_SECONDS
from rayfin.actors.weights.tensors import NAMES, NamedTensors, plain_tensor

BUCKET_BYTES = 256 << 20
EDGE = 8
"""Each tensor begins at a multiple of so many bytes."""

Entry = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape and first byte of a tensor."""

DTYPES = {stored: dtype for dtype, stored in NAMES.items()}


def put(
    tensors: NamedTensors | Mapping[str, torch.Tensor], bucket: int = BUCKET_BYTES
) -> Iterator[Any]:
    """Puts tensors into Ray's store, and yields the refs, each once it is asked for.

    ``update_weights`` takes them, also those of several programs that have a part of the tensors
    each.

    Args:
        bucket: bytes of an object; a tensor that is larger has one alone.

    Raises:
        InvalidRequest: one is no tensor of floating-point numbers.
    """
    named: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
    table, parts, end = list[Entry](), list[Any](), 0
    for name, tensor in named:
        stored = plain_tensor(name, tensor)
        content = stored.reshape(-1).view(torch.uint8).numpy()
        if parts and end + content.size > bucket:
            yield ray.put((table, np.concatenate(parts)))
            table, parts, end = [], [], 0
        table.append((name, NAMES[stored.dtype], tuple(stored.shape), end))
        parts += [content, np.zeros(-content.size % EDGE, np.uint8)]
        end += content.size + parts[-1].size
    if parts:
        yield ray.put((table, np.concatenate(parts)))


def opened(items: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields named tensors; in place of a ref those of its bucket.

    Raises:
        InvalidRequest: a ref is of no bucket, or its bucket is gone.
    """
    for item in items:
        if not isinstance(item, ray.ObjectRef):
            yield item
            continue
        try:
            table, data = ray.get(item, timeout=WEIGHTS_BUCKET_SECONDS)
            for name, dtype, shape, first in table:
                tensor = torch.empty(shape, dtype=DTYPES[dtype])
                content = tensor.reshape(-1).view(torch.uint8).numpy()
                content[:] = data[first : first + content.size]
                yield name, tensor
        except (RayError, GetTimeoutError) as error:
            raise InvalidRequest(
                f"weights: a bucket does not come: {type(error).__name__}", "weights"
            ) from None
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise InvalidRequest(
                f"weights: {item} is no bucket: {error}"[:300], "weights"
            ) from None
