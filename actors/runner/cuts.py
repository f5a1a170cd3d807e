"""Which part of a checkpoint's tensors a rank's parameter is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """Of one tensor."""

    dim: int
    start: int
    stop: int  # may be over ``whole``: the rest is zeros
    whole: int


@dataclass(frozen=True, slots=True)
class ExpertsCut:
    """Of all experts' gate and up projections, or of all their down projections."""

    start: int
    stop: int
    whole: int  # the experts' inner width


Cuts = dict[str, Cut | ExpertsCut]
"""By the parameter's name; what is not there is whole."""
