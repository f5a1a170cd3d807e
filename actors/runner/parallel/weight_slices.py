"""Which part of a checkpoint's tensors a rank's parameter is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WeightSlice:
    """Of one tensor."""

    dim: int
    start: int
    stop: int  # may be over ``whole``: the rest is zeros
    whole: int


@dataclass(frozen=True, slots=True)
class MergedSlice:
    """Several parts of one tensor, one after the other along the dimension that all are cut in."""

    parts: tuple[WeightSlice, ...]


@dataclass(frozen=True, slots=True)
class TransposedSlice:
    """The parameter is the transpose of this part."""

    of: WeightSlice | MergedSlice


@dataclass(frozen=True, slots=True)
class ExpertsSlice:
    """Of all experts' gate and up projections, or of all their down projections."""

    start: int
    stop: int
    whole: int  # the experts' inner width


AnyCut = WeightSlice | MergedSlice | TransposedSlice | ExpertsSlice
Cuts = dict[str, AnyCut]
"""By the name in a checkpoint; what is not there is whole."""


# A rank's share of a mixture's experts: of each its part of the inner width, summed over ranks.
#
# The router is whole on each rank, so all of them choose alike. A checkpoint keeps the experts'
# weights in two tensors for all of them, or one by one under other names: both are read in
# slices.


Read = Callable[[str, torch.Size, WeightSlice | None], torch.Tensor]
"""Name, shape of the part, which part -> the part."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"

_FORMS = (  # of one expert: what stands for "mlp", and its gate, up and down
    ("mlp", "gate_proj", "up_proj", "down_proj"),  # Qwen 2 and 3, OLMoE
    ("block_sparse_moe", "w1", "w3", "w2"),  # Mixtral
)


_OLD_NAMES = {
    ".mlp.": ".block_sparse_moe.",  # Mixtral's router
    "lm_head.": "embed_out.",  # GPT-NeoX
}


def stored_name(name: str, known: Callable[[str], bool]) -> str:
    """The name under which a checkpoint has a parameter that transformers has renamed since."""
    others = (name.replace(new, old) for new, old in _OLD_NAMES.items())
    return name if known(name) else next(filter(known, others), name)


def read_experts(
    name: str, shape: torch.Size, cut: ExpertsSlice, known: Callable[[str], bool], read: Read
) -> torch.Tensor:
    """A rank's part [E, ...] of the experts' parameter ``name``.

    Raises:
        InvalidConfig: it is not there, under no name that is known (``read`` says so).
    """
    count, width = shape[0], cut.stop - cut.start
    is_down = name.endswith(DOWN)
    base = name.rpartition(".")[0]
    for mlp, gate, up, down in _FORMS:
        prefix = base.replace(".mlp.", f".{mlp}.")
        if not known(f"{prefix}.0.{down}.weight"):
            continue
        own = WeightSlice(1 if is_down else 0, cut.start, cut.stop, cut.whole)
        rows = [shape[1], width] if is_down else [width, shape[2]]
        kinds = (down,) if is_down else (gate, up)
        experts = [
            torch.cat(
                [read(f"{prefix}.{i}.{kind}.weight", torch.Size(rows), own) for kind in kinds]
            )
            for i in range(count)
        ]
        return torch.stack(experts)
    if is_down:
        return read(name, shape, WeightSlice(2, cut.start, cut.stop, cut.whole))
    half = torch.Size([count, width, shape[2]])
    whole = 2 * cut.whole
    parts = [
        read(name, half, WeightSlice(1, first + cut.start, first + cut.stop, whole))
        for first in (0, cut.whole)
    ]
    return torch.cat(parts, dim=1)
