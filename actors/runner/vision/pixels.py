"""The arrays of an image, which come with its request or from Ray's object store."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rayfin.actors.errors import RequestFailed
from rayfin.actors.timing import PIXELS_SECONDS


def fetch(pixels: Any) -> Mapping[str, np.ndarray]:
    """The arrays that ``ImageInput.pixels`` stands for.

    Raises:
        RequestFailed: the process that had them is gone.
    """
    if isinstance(pixels, Mapping):
        return pixels
    import ray  # an engine inside a program has none

    try:
        found: Mapping[str, np.ndarray] = ray.get(pixels, timeout=PIXELS_SECONDS)
    except ray.exceptions.RayError as error:
        raise RequestFailed(f"an image is lost: {type(error).__name__}") from error
    return found
