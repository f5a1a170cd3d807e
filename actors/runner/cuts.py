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
class MergedCut:
    """Several parts of one tensor, one after the other along the dimension that all are cut in."""

    parts: tuple[Cut, ...]


@dataclass(frozen=True, slots=True)
class Transposed:
    """The parameter is the transpose of this part."""

    of: Cut | MergedCut


@dataclass(frozen=True, slots=True)
class ExpertsCut:
    """Of all experts' gate and up projections, or of all their down projections."""

    start: int
    stop: int
    whole: int  # the experts' inner width


AnyCut = Cut | MergedCut | Transposed | ExpertsCut
Cuts = dict[str, AnyCut]
"""By the name in a checkpoint; what is not there is whole."""
