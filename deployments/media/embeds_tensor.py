"""A tensor of a request, as numpy has it: this process has no torch."""

from dataclasses import dataclass

import numpy as np

from rayfin.actors.errors import InvalidRequest

FIELD = "prompt_embeds"
DTYPES: dict[str, "np.dtype[np.generic]"] = {
    "float64": np.dtype("<f8"),
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # the bits: numpy has no such numbers
}
"""The dtypes that embeddings may come in."""

BFLOAT16_EXPONENT = 0x7F80


def refused(why: str) -> InvalidRequest:
    """The error of bytes that are no tensor which can be taken; ``why`` is for the client."""
    return InvalidRequest(f"'{FIELD}': {why}.", FIELD, "invalid_embeds")


@dataclass(frozen=True, slots=True)
class Tensor:
    """Numbers of one of ``DTYPES``."""

    array: np.ndarray
    dtype: str

    def is_finite(self) -> bool:
        """Whether no number is an infinity or NaN."""
        if self.dtype == "bfloat16":
            exponents = self.array & np.uint16(BFLOAT16_EXPONENT)
            return not bool((exponents == BFLOAT16_EXPONENT).any())
        return bool(np.isfinite(self.array).all())

    def narrowed(self) -> "Tensor":
        """The same in 32 bits, if it has 64; numbers that do not fit become infinities."""
        if self.dtype != "float64":
            return self
        with np.errstate(over="ignore"):
            return Tensor(self.array.astype(np.float32), "float32")
