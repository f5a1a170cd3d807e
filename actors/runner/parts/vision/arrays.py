"""Arrays of a prompt, which come with its request or from Ray's object store."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rayfin.actors.errors import RequestFailed
from rayfin.actors.timing import PIXELS_SECONDS


def fetch(arrays: Any, what: str = "an image or clip") -> Mapping[str, np.ndarray]:
    """The arrays that ``MediaInput.arrays``, say, stands for; ``what`` names them in errors.

    Raises:
        RequestFailed: the process that had them is gone.
    """
    if isinstance(arrays, Mapping):
        return arrays
    import ray  # an engine inside a program has none

    try:
        fetched: Mapping[str, np.ndarray] = ray.get(arrays, timeout=PIXELS_SECONDS)
    except ray.exceptions.RayError as error:
        raise RequestFailed(f"{what} is lost: {type(error).__name__}") from error
    return fetched
