"""Experts in blocks of 4-bit floats (MXFP4), which gpt-oss has, left in the files until packed.

transformers' parameters of such experts are [E, H, 2 F], gate and up outputs in turn, and
[E, F, H]; the checkpoint has blocks of the outputs [E, 2 F, H / 32, 16] and [E, H, F / 32, 16], and
as many exponents (OCP Microscaling Formats, 2023).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from rayfin.actors.runner.quantized.experts import (
    CPU,
    DOWN,
    GATE_UP,
    Expert,
    QuantExperts,
    TensorFiles,
    TensorPlace,
)
from rayfin.actors.runner.quantized.formats import MX_BLOCK, Part, mxfp4_groups, refuse
from rayfin.kernels.cpu.experts import ExpertBiases
from rayfin.kernels.grouped import Grouped

BIASES = (f"{GATE_UP}_bias", f"{DOWN}_bias")
Stored = Mapping[str, tuple[torch.dtype | None, tuple[int, ...]]]
"""Types and shapes of a module's tensors."""


@dataclass(frozen=True, slots=True)
class Mxfp4Layer:
    """One projection of one expert: some outputs of its blocks."""

    outputs: int
    inputs: int
    blocks: TensorPlace
    scales: TensorPlace
    files: TensorFiles
    expert: int
    rows: slice

    def grouped(self) -> Grouped:
        """The weight [outputs, inputs], read out of the files."""
        every = slice(None)
        return self._read(every, every)

    def part(self, part: Part) -> Grouped | None:
        """Some outputs or inputs, of which nothing else is read; None if a block is cut."""
        every, here = slice(None), part.each(MX_BLOCK if part.dim else 1, self.inputs)
        if here is None:
            return None
        return self._read(every, here) if part.dim else self._read(here, every)

    def _read(self, outputs: slice, blocks: slice) -> Grouped:
        places = (self.blocks, self.scales)
        rows = (self.files.read(place)[self.expert, self.rows] for place in places)
        return mxfp4_groups(*(tensor[outputs, blocks].to(self.files.device) for tensor in rows))


class _Weight(NamedTuple):
    """One projection of all experts."""

    shape: tuple[int, int, int]  # experts, outputs, inputs
    blocks: TensorPlace
    scales: TensorPlace
    files: TensorFiles

    def layer(self, expert: int, rows: slice) -> Mxfp4Layer:
        """Some outputs of one expert."""
        _, outputs, inputs = self.shape
        count = len(range(*rows.indices(outputs)))
        return Mxfp4Layer(count, inputs, self.blocks, self.scales, self.files, expert, rows)


class Mxfp4QuantExperts(QuantExperts):
    """Such experts; their biases are parameters, which transformers loads."""

    def __init__(
        self,
        module: nn.Module,
        experts: list[Expert],
        dtype: torch.dtype,
        device: torch.device = CPU,
    ) -> None:
        super().__init__(module, experts, dtype, device)
        for name in BIASES:
            self.register_parameter(name, module.get_parameter(name))

    @property
    def biases(self) -> ExpertBiases:
        gate_up, down = (self.get_parameter(name).detach() for name in BIASES)
        return ExpertBiases(torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1), down)

    def _merged(self, numbers: Iterable[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        some = list(numbers)
        merged = super()._merged(some, dtype)
        gate_up, down = merged[GATE_UP].mT, merged[DOWN].mT
        return {
            GATE_UP: torch.stack(gate_up.chunk(2, dim=-1), dim=-1).flatten(-2),
            DOWN: down.contiguous(),
            **{name: self.get_parameter(name).detach()[some].to(dtype) for name in BIASES},
        }


def coded_experts(
    module: nn.Module, experts: list[Expert], dtype: torch.dtype, device: torch.device = CPU
) -> QuantExperts:
    """What takes the place of transformers' module of these experts."""
    has_biases = set(BIASES) <= set(module._parameters)
    kind = Mxfp4QuantExperts if has_biases else QuantExperts
    return kind(module, experts, dtype, device)


def mxfp4_experts(
    model: nn.Module,
    layers: Mapping[str, Stored],
    places: Mapping[str, Mapping[str, TensorPlace]],
    files: TensorFiles,
) -> dict[str, list[Expert]]:
    """The experts that the checkpoint has in blocks, by the paths of their modules.

    Args:
        layers: the tensors of each module by its path.
        places: where they lie.

    Raises:
        InvalidConfig: Blocks or exponents have another shape or type than the model wants.
    """
    by_path = dict[str, list[Expert]]()
    for path, module in model.named_modules():
        stored, shapes = layers.get(path, {}), _shapes(module)
        if f"{GATE_UP}_blocks" not in stored or f"{DOWN}_blocks" not in stored or shapes is None:
            continue
        for name, shape in shapes.items():
            _require(path, stored, name, shape)
        module_places = places[path]
        weights = {
            name: _Weight(
                shape, module_places[f"{name}_blocks"], module_places[f"{name}_scales"], files
            )
            for name, shape in shapes.items()
        }
        by_path[path] = [
            Expert(
                weights[GATE_UP].layer(number, slice(0, None, 2)),
                weights[GATE_UP].layer(number, slice(1, None, 2)),
                weights[DOWN].layer(number, slice(None)),
            )
            for number in range(shapes[DOWN][0])
        ]
    return by_path


def _shapes(module: nn.Module) -> dict[str, tuple[int, int, int]] | None:
    """Experts, outputs and inputs of a module's weights, or None if it is of another form."""
    shapes = {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)
    }
    if set(shapes) != {GATE_UP, DOWN, *BIASES} or len(shapes[DOWN]) != 3:
        return None
    count, inner, hidden = shapes[DOWN]
    if shapes[GATE_UP] != (count, hidden, 2 * inner):
        return None
    return {GATE_UP: (count, 2 * inner, hidden), DOWN: (count, hidden, inner)}


def _require(path: str, stored: Stored, name: str, shape: tuple[int, int, int]) -> None:
    """Raises unless a weight's blocks and exponents are stored in these sizes."""
    count, outputs, inputs = shape
    if inputs % MX_BLOCK:
        raise refuse(
            f"the model's {path}.{name} has {inputs} inputs, no whole blocks of {MX_BLOCK}"
        )
    groups = (count, outputs, inputs // MX_BLOCK)
    for leaf, wanted in ((f"{name}_blocks", (*groups, MX_BLOCK // 2)), (f"{name}_scales", groups)):
        dtype, stored_shape = stored[leaf]
        if stored_shape != wanted or dtype != torch.uint8:
            raise refuse(
                f"the checkpoint's {path}.{leaf} is {str(dtype).removeprefix('torch.')} of shape "
                f"{list(stored_shape)}, and the model wants uint8 of {list(wanted)}"
            )
