"""Experts of a mixture that stay codes in the mapped checkpoint until they are packed.

transformers merges the layers of all experts into two parameters, and codes cannot lie there. So a
module without parameters takes the place of these experts. It knows where in the files each layer
lies, and reads one expert at a time.
"""

import copy
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    rename_source_key,
)

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.quantized.formats import Format, Part, Slot, Tensors, input_order, refuse
from rayfin.actors.runner.quantized.linear import grouped
from rayfin.kernels.cpu.experts import ExpertBiases
from rayfin.kernels.grouped import Grouped

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""transformers' parameters [E, 2 F, H] and [E, H, F]."""

ORDERS = ("g_idx", "weight_g_idx")
"""What formats call the group of each input."""

CPU = torch.device("cpu")

_LAYER = re.compile(r"(.+)\.(\d+)\.(\w+)")
"""The experts, a number, and the name of a projection."""


class TensorPlace(NamedTuple):
    """Where a tensor lies."""

    file: Path
    key: str


class TensorFiles:
    """Mapped safetensors files: on a CPU a tensor that is read takes no memory of its own."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device  # of the numbers that are made of the tensors
        self._open: dict[Path, Any] = {}

    def read(self, place: TensorPlace) -> torch.Tensor:
        """The tensor as it is stored; nothing may write it."""
        if place.file not in self._open:
            self._open[place.file] = safe_open(place.file, framework="pt")
        tensor: torch.Tensor = self._open[place.file].get_tensor(place.key)
        return tensor


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer in the files, such as one projection of one expert."""

    name: str
    outputs: int
    inputs: int
    format: Format
    slots: Mapping[str, tuple[Slot, tuple[int, ...]]]  # with the stored shapes
    places: Mapping[str, TensorPlace]
    files: TensorFiles

    def grouped(self) -> Grouped:
        """The weight [outputs, inputs], read out of the files.

        Raises:
            InvalidConfig: The tensors contradict each other.
        """
        return self._grouped(self._tensors(), self.outputs, self.inputs)

    def part(self, part: Part) -> Grouped | None:
        """Some outputs or inputs, of which nothing else is read; None if they lie not apart.

        Raises:
            InvalidConfig: The tensors contradict each other.
        """
        tensors = self._tensors()
        try:
            sliced = self.format.part(self.outputs, self.inputs, tensors, part)
        except (InvalidConfig, ValueError, KeyError):
            return None  # `grouped` says what is wrong
        if sliced is None:
            return None
        return self._grouped(sliced, *part.sizes(self.outputs, self.inputs))

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {leaf: self.files.read(self.places[leaf]) for leaf in self.slots}

    def _grouped(self, tensors: Tensors, outputs: int, inputs: int) -> Grouped:
        moved = {
            leaf: tensor.to(self.files.device, self.slots[leaf][0].dtype)
            for leaf, tensor in tensors.items()
        }
        return grouped(self.name, self.format, outputs, inputs, moved)

    def order(self) -> torch.Tensor | None:
        """The inputs [inputs] int64 in the order of their groups, or None if that is their own.

        Raises:
            InvalidConfig: The layer's groups are of other sizes.
        """
        leaf = next((leaf for leaf in ORDERS if leaf in self.slots), None)
        if leaf is None:
            return None
        groups = self.files.read(self.places[leaf]).to(self.files.device)
        width = self.format.width(self.inputs)
        try:
            return input_order(groups, self.inputs, width)
        except InvalidConfig as error:
            raise refuse(f"the checkpoint's {self.name}: {error}") from None


@dataclass(frozen=True, slots=True)
class ExactLayer:
    """A projection of an expert that is stored exactly, beside others that are quantised."""

    outputs: int
    inputs: int
    place: TensorPlace
    files: TensorFiles

    def grouped(self) -> Grouped:
        """The weight [outputs, inputs] as it is, with scales of 1; no kernel reads such codes."""
        values = self.files.read(self.place).to(self.files.device, torch.float32)
        scale = torch.ones(self.outputs, 1, device=values.device)
        return Grouped(values, scale, self.inputs, 32)


class CodedProjection(Protocol):
    """One projection of one expert, as ``StoredLayer``."""

    @property
    def outputs(self) -> int: ...
    @property
    def inputs(self) -> int: ...
    def grouped(self) -> Grouped: ...


class Expert(NamedTuple):
    """The projections of an expert."""

    gate: CodedProjection
    up: CodedProjection
    down: CodedProjection


class QuantExperts(nn.Module):
    """Takes the place of transformers' experts; its slow and obvious forward is the reference.

    Fast kernels take the ``experts``; `dequantized()` is transformers' module of the same numbers.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: list[Expert],
        dtype: torch.dtype,
        device: torch.device = CPU,  # of their numbers
    ) -> None:
        super().__init__()
        # In a tuple: its parameters, which have no memory, are no part of the model.
        self._original = (module,)
        self.experts, self.dtype, self._device = experts, dtype, device
        self.intermediate, self.hidden = experts[0].gate.outputs, experts[0].gate.inputs

    @property
    def original(self) -> nn.Module:
        """transformers' module, whose parameters have no memory."""
        return self._original[0]

    @property
    def biases(self) -> ExpertBiases | None:
        """What the experts add to their products."""
        return None

    @property
    def weights(self) -> int:
        """The number of weights, each of them in codes."""
        return 3 * len(self.experts) * self.intermediate * self.hidden

    def dequantized(self) -> nn.Module:
        """transformers' module with these weights, rounded to the model's dtype."""
        module = self.original
        weights = self._merged(range(len(self.experts)), self.dtype)
        for name, weight in weights.items():
            module._parameters[name] = nn.Parameter(weight, requires_grad=False)
        return module.eval()

    def forward(
        self,
        hidden_states: torch.Tensor,  # [T, H]
        top_k_index: torch.Tensor,  # [T, K] int64
        top_k_weights: torch.Tensor,  # [T, K]
    ) -> torch.Tensor:
        """[T, H]: transformers' own loop, over the weights of the experts that are chosen."""
        module = self.original
        chosen, places = torch.unique(top_k_index, return_inverse=True)
        twin = copy.copy(module)
        twin.__dict__["_parameters"] = self._merged(chosen.tolist(), hidden_states.dtype)
        loop = inspect.unwrap(type(module).forward)
        out: torch.Tensor = loop(twin, hidden_states, places, top_k_weights)
        return out

    def _merged(self, numbers: Iterable[int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The weights of some experts as transformers' parameters."""
        some, inner = [self.experts[number] for number in numbers], self.intermediate
        kind: dict[str, Any] = {"dtype": dtype, "device": self._device}
        gate_up = torch.empty(len(some), 2 * inner, self.hidden, **kind)
        down = torch.empty(len(some), self.hidden, inner, **kind)
        for at, expert in enumerate(some):
            gate_up[at, :inner] = expert.gate.grouped().dense()
            gate_up[at, inner:] = expert.up.grouped().dense()
            down[at] = expert.down.grouped().dense()
        return {GATE_UP: gate_up, DOWN: down}


class ExpertNames(NamedTuple):
    """The names of the layers of a module's experts, by number."""

    gate: dict[int, str]
    up: dict[int, str]
    down: dict[int, str]


def expert_names(model: PreTrainedModel, layers: Iterable[str]) -> dict[str, ExpertNames]:
    """By the path of transformers' module: which of the stored ``layers`` are merged there.

    Modules of another form, and those that transformers does not merge expert by expert, are left
    out.

    Raises:
        InvalidConfig: An expert lacks a layer.
    """
    counts = {path: len(module._parameters[DOWN]) for path, module in _mergeable(model)}  # type: ignore[arg-type]
    converters = [
        entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightConverter)
    ]
    parts: dict[tuple[str, str], str | None] = {}
    by_path: dict[str, ExpertNames] = {}
    for name in layers:
        match = _LAYER.fullmatch(name)
        if match is None or match[1] not in counts:
            continue
        path, number, projection = match[1], int(match[2]), match[3]
        if (path, projection) not in parts:
            parts[path, projection] = _part(path, projection, converters)
        if (part := parts[path, projection]) is not None:
            getattr(by_path.setdefault(path, ExpertNames({}, {}, {})), part)[number] = name
    whole = {path: names for path, names in by_path.items() if all(names)}
    for path, names in whole.items():
        for numbers in names:
            _require_all(path, counts[path], numbers)
    return whole


def _mergeable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose parameters are [E, 2 F, H] and [E, H, F], by their paths."""
    for path, module in model.named_modules():
        shapes = {
            name: parameter.shape for name, parameter in module.named_parameters(recurse=False)
        }
        if set(shapes) == {GATE_UP, DOWN} and all(len(shape) == 3 for shape in shapes.values()):
            count, hidden, inner = shapes[DOWN]
            if shapes[GATE_UP] == (count, 2 * inner, hidden):
                yield path, module


def _part(path: str, projection: str, converters: list[WeightConverter]) -> str | None:
    """Which of "gate", "up" and "down" transformers makes of a projection, if it merges it."""
    target, pattern = rename_source_key(f"{path}.0.{projection}.weight", [], converters)
    for converter in converters:
        if pattern not in converter.source_patterns:
            continue
        kinds = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
        place, count = converter.source_patterns.index(pattern), len(converter.source_patterns)
        merged = (MergeModulelist, 0)
        if target == f"{path}.{GATE_UP}" and kinds == [merged, (Concatenate, 1)] and count == 2:
            return ("gate", "up")[place]
        if target == f"{path}.{DOWN}" and kinds == [merged] and count == 1:
            return "down"
        return None
    return None


def merges_projections(model: PreTrainedModel, path: str) -> bool:
    """Whether transformers merges layers gate_proj, up_proj and down_proj of each expert there."""
    converters = [
        entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightConverter)
    ]
    parts = ("gate", "up", "down")
    return all(_part(path, f"{part}_proj", converters) == part for part in parts)


def _require_all(path: str, count: int, names: dict[int, str]) -> None:
    """Raises unless there is a layer for each of the ``count`` experts."""
    projection = next(iter(names.values())).rpartition(".")[2]
    for number in range(count):
        if number not in names:
            raise refuse(
                f"the checkpoint lacks {path}.{number}.{projection}, which its experts need"
            )
    if len(names) > count:
        raise refuse(f"the checkpoint has {len(names)} of {count} experts in {path}")


def quant_experts(model: nn.Module) -> list[tuple[nn.Module, str, QuantExperts]]:
    """Owner, attribute and module of the experts that are codes still."""
    return [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, QuantExperts)
    ]
