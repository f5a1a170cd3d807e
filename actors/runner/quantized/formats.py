"""How quantised checkpoints store the weight of a linear layer; each becomes a ``Grouped``.

A format has the names of a layer's tensors as the checkpoint has them, their shapes and types, and
the way from them to codes, scales and zero points. Sizes are those of the layer: [outputs, inputs].
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rayfin.actors.errors import InvalidConfig
from rayfin.kernels.grouped import E2M1, Grouped, SharedScales, unpack_bits

INT32, FLOAT = torch.int32, torch.float32
E4M3 = torch.float8_e4m3fn
MX_BLOCK = 32  # inputs that share an exponent in microscaling formats
NV_BLOCK = 16  # and an e4m3 scale in NVFP4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of each output among the eight of a word


class Slot(NamedTuple):
    """A tensor of a layer; None stands for any number of elements."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype


Tensors = Mapping[str, torch.Tensor]


class Part(NamedTuple):
    """Consecutive outputs (``dim`` 0) or inputs (1) of a layer."""

    dim: int
    run: range

    def sizes(self, outputs: int, inputs: int) -> tuple[int, int]:
        """The outputs and inputs of the part."""
        return (len(self.run), inputs) if self.dim == 0 else (outputs, len(self.run))

    def each(self, step: int, whole: int) -> slice | None:
        """The part of what there is one of for ``step`` of ``whole``; None if the part cuts one."""
        start, stop = self.run.start, self.run.stop
        if start % step or (stop % step and stop != whole):
            return None
        return slice(start // step, groups_of(stop, step))

    def groups(self, width: int, inputs: int) -> slice | None:
        """The groups of some inputs, or None if the part cuts one of several."""
        return slice(0, 1) if width >= inputs else self.each(width, inputs)


def refuse(why: str) -> InvalidConfig:
    """The error of a checkpoint that is not served."""
    return InvalidConfig(why, "quantization")


def groups_of(inputs: int, group: int) -> int:
    """The number of groups of ``inputs``, the last of which may be shorter."""
    return -(-inputs // group)


@dataclass(frozen=True)
class Format(ABC):
    """One way to store a layer."""

    bits: int
    group: int | None = None  # inputs that share a scale; None: all of an output
    method: str = ""

    @property
    def key(self) -> str:
        """The tensor with the codes."""
        return "weight"

    def as_stored(self, names: Iterable[str]) -> "Format":
        """The format of a layer that has tensors of these names."""
        return self

    @property
    def label(self) -> str:
        """The format in words, for the log."""
        groups = "a scale per output" if self.group is None else f"groups of {self.group}"
        return f"{self.method} {self.bits} bits, {groups}"

    def width(self, inputs: int) -> int:
        """Inputs that share a scale."""
        return self.group or inputs

    @abstractmethod
    def slots(
        self, outputs: int, inputs: int, stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Slot]:
        """The tensors to read, by name; ``stored`` has the shapes of those in the checkpoint.

        Raises:
            InvalidConfig: A layer of these sizes cannot be stored so.
        """

    @abstractmethod
    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        """The weight.

        Raises:
            InvalidConfig: The tensors contradict each other.
        """

    @abstractmethod
    def part(
        self, outputs: int, inputs: int, tensors: Tensors, part: Part
    ) -> dict[str, torch.Tensor] | None:
        """The tensors of a part as views, or None if it cuts words, groups or blocks."""


@dataclass(frozen=True)
class Gptq(Format):
    """GPTQ: codes packed along the inputs; ``g_idx`` has the group of each input.

    Version 1 stores zero points less one.
    """

    version: int = 1

    @property
    def key(self) -> str:
        return "qweight"

    def slots(
        self, outputs: int, inputs: int, stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Slot]:
        each = 32 // self.bits
        if inputs % each or outputs % each:
            raise refuse(f"{outputs} x {inputs} does not fill words of {each} codes")
        groups = groups_of(inputs, self.width(inputs))
        slots = {
            "qweight": Slot((inputs // each, outputs), INT32),
            "qzeros": Slot((groups, outputs // each), INT32),
            "scales": Slot((groups, outputs), FLOAT),
        }
        if "g_idx" in stored:
            slots["g_idx"] = Slot((inputs,), INT32)
        return slots

    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        group = self.width(inputs)
        values = unpack_bits(tensors["qweight"].T, self.bits)
        zero = unpack_bits(tensors["qzeros"], self.bits).T.int() + (self.version == 1)
        order = input_order(tensors.get("g_idx"), inputs, group)
        if order is not None:
            values = values[:, order]
        scale = tensors["scales"].T.float()
        return Grouped(
            values.contiguous(),
            scale.contiguous(),
            group,
            self.bits,
            zero.contiguous(),
            order=order,
        )

    def part(
        self, outputs: int, inputs: int, tensors: Tensors, part: Part
    ) -> dict[str, torch.Tensor] | None:
        words = part.each(32 // self.bits, -1)
        group = self.width(inputs)
        if words is None:
            return None
        sliced = dict(tensors)
        if part.dim == 0:
            here = slice(part.run.start, part.run.stop)
            sliced["qweight"] = sliced["qweight"][:, here]
            sliced["scales"] = sliced["scales"][:, here]
            sliced["qzeros"] = sliced["qzeros"][:, words]
            return sliced
        groups = part.groups(group, inputs)
        if groups is None or input_order(sliced.pop("g_idx", None), inputs, group) is not None:
            return None
        sliced["qweight"] = sliced["qweight"][words]
        sliced["qzeros"], sliced["scales"] = sliced["qzeros"][groups], sliced["scales"][groups]
        return sliced


def input_order(g_idx: torch.Tensor | None, inputs: int, group: int) -> torch.Tensor | None:
    """The inputs sorted by their group, or None if they are.

    Raises:
        InvalidConfig: Groups are of other sizes, or do not exist.
    """
    plain = torch.arange(inputs) // group
    if g_idx is None or torch.equal(g_idx.long().cpu(), plain):
        return None
    sorted_groups, order = g_idx.long().cpu().sort(stable=True)
    if not torch.equal(sorted_groups, plain):
        raise refuse(f"g_idx does not put the {inputs} inputs into groups of {group}")
    return order.to(g_idx.device)


@dataclass(frozen=True)
class Awq(Format):
    """AWQ ("gemm"): codes packed along the outputs, eight of them in an order of their own."""

    @property
    def key(self) -> str:
        return "qweight"

    def slots(
        self, outputs: int, inputs: int, stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Slot]:
        if outputs % 8:
            raise refuse(f"{outputs} outputs do not fill words of 8 codes")
        groups = groups_of(inputs, self.width(inputs))
        return {
            "qweight": Slot((inputs, outputs // 8), INT32),
            "qzeros": Slot((groups, outputs // 8), INT32),
            "scales": Slot((groups, outputs), FLOAT),
        }

    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        def unpack(words: torch.Tensor) -> torch.Tensor:
            # Words are turned before they are taken apart: an eighth as many, of a whole word each.
            turned = words.T.contiguous()
            eights = [(turned >> 4 * place & 15).to(torch.uint8) for place in AWQ_ORDER]
            return torch.stack(eights, dim=1).view(outputs, -1)

        scale = tensors["scales"].T.float().contiguous()
        zero = unpack(tensors["qzeros"]).int()
        return Grouped(unpack(tensors["qweight"]), scale, self.width(inputs), 4, zero)

    def part(
        self, outputs: int, inputs: int, tensors: Tensors, part: Part
    ) -> dict[str, torch.Tensor] | None:
        words, groups = part.each(8, -1), part.groups(self.width(inputs), inputs)
        here = slice(part.run.start, part.run.stop)
        if part.dim == 0 and words is not None:
            columns = {"qweight": words, "qzeros": words, "scales": here}
            return {leaf: tensors[leaf][:, columns[leaf]] for leaf in columns}
        if part.dim == 1 and groups is not None:
            rows = {"qweight": here, "qzeros": groups, "scales": groups}
            return {leaf: tensors[leaf][rows[leaf]] for leaf in rows}
        return None


@dataclass(frozen=True)
class Packed(Format):
    """compressed-tensors "pack-quantized": codes along the inputs, half their range added."""

    symmetric: bool = True

    @property
    def key(self) -> str:
        return "weight_packed"

    def slots(
        self, outputs: int, inputs: int, stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Slot]:
        groups = groups_of(inputs, self.width(inputs))
        slots = {
            "weight_packed": Slot((outputs, -(-inputs * self.bits // 32)), INT32),
            "weight_scale": Slot((outputs, groups), FLOAT),
        }
        if "weight_shape" in stored:
            slots["weight_shape"] = Slot((2,), torch.int64)
        if not self.symmetric:
            slots["weight_zero_point"] = Slot((-(-outputs * self.bits // 32), groups), INT32)
        if "weight_g_idx" in stored:
            slots["weight_g_idx"] = Slot((inputs,), INT32)
        return slots

    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        shape = tensors.get("weight_shape")
        if shape is not None and shape.tolist() != [outputs, inputs]:
            raise refuse(f"weight_shape says {shape.tolist()} of a layer of {[outputs, inputs]}")
        values = unpack_bits(tensors["weight_packed"], self.bits)[:, :inputs]
        scale, half = tensors["weight_scale"].float(), 2 ** (self.bits - 1)
        if self.symmetric:
            zero = torch.full(scale.shape, half, dtype=INT32, device=scale.device)
        else:
            points = unpack_bits(tensors["weight_zero_point"].T, self.bits)
            zero = points.T[:outputs].int().contiguous()
        group = self.width(inputs)
        order = input_order(tensors.get("weight_g_idx"), inputs, group)
        if order is not None:
            values = values[:, order]
        return Grouped(values.contiguous(), scale.contiguous(), group, self.bits, zero, order=order)

    def part(
        self, outputs: int, inputs: int, tensors: Tensors, part: Part
    ) -> dict[str, torch.Tensor] | None:
        words, group = part.each(32 // self.bits, (outputs, inputs)[part.dim]), self.width(inputs)
        groups = part.groups(group, inputs)
        if words is None or (part.dim == 1 and groups is None):
            return None
        sliced, here = dict(tensors), slice(part.run.start, part.run.stop)
        rows = {"weight_packed": here, "weight_scale": here, "weight_zero_point": words}
        columns = {"weight_packed": words, "weight_scale": groups, "weight_zero_point": groups}
        if part.dim == 1:
            order = input_order(sliced.pop("weight_g_idx", None), inputs, group)
            if order is not None:
                return None
        for leaf in rows.keys() & sliced.keys():
            tensor = sliced[leaf]
            sliced[leaf] = tensor[rows[leaf]] if part.dim == 0 else tensor[:, columns[leaf]]
        if "weight_shape" in sliced:
            sliced["weight_shape"] = torch.tensor(part.sizes(*sliced["weight_shape"].tolist()))
        return sliced


@dataclass(frozen=True)
class PackedFloats(Format):
    """compressed-tensors "mxfp4-pack-quantized": two floats a byte, exponents of 32."""

    @property
    def key(self) -> str:
        return "weight_packed"

    def slots(
        self, outputs: int, inputs: int, stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Slot]:
        if inputs % MX_BLOCK:
            raise refuse(f"{outputs} x {inputs} does not fill blocks of {MX_BLOCK}")
        return {
            "weight_packed": Slot((outputs, inputs // 2), torch.uint8),
            "weight_scale": Slot((outputs, inputs // MX_BLOCK), torch.uint8),
        }

    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        blocks = tensors["weight_packed"].view(outputs, -1, MX_BLOCK // 2)
        return mxfp4_groups(blocks, tensors["weight_scale"])

    def part(
        self, outputs: int, inputs: int, tensors: Tensors, part: Part
    ) -> dict[str, torch.Tensor] | None:
        if part.dim == 0:
            rows = slice(part.run.start, part.run.stop)
            return {leaf: tensor[rows] for leaf, tensor in tensors.items()}
        blocks = part.each(MX_BLOCK, inputs)
        if blocks is None:
            return None
        octets = slice(part.run.start // 2, part.run.stop // 2)
        columns = {"weight_packed": octets, "weight_scale": blocks}
        return {leaf: tensor[:, columns[leaf]] for leaf, tensor in tensors.items()}


@dataclass(frozen=True)
class Nvfp4(Format):
    """NVFP4: two floats of 4 bits in a byte, e4m3 scales of 16 inputs, and one scale of all.

    compressed-tensors stores that one's reciprocal, NVIDIA's ModelOpt itself. Numbers of the table
    are multiplied by it, so that the scales of groups are exact in 16 bits.
    """

    codes: str = "weight_packed"
    whole: str = "weight_global_scale"
    is_divisor: bool = True
    mixed: bool = False  # with layers of fp8, which have no scale of all

    @property
    def key(self) -> str:
        return self.codes

    def as_stored(self, names: Iterable[str]) -> "Format":
        if not self.mixed or self.whole in names:
            return self
        return Plain(8, None, self.method, dtype=E4M3)

    def slots(
        self, outputs: int, inputs: int, stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Slot]:
        if inputs % NV_BLOCK:
            raise refuse(f"{outputs} x {inputs} does not fill blocks of {NV_BLOCK}")
        if "pre_quant_scale" in stored:
            raise refuse("pre_quant_scale, factors on inputs (AWQ's), is not served")
        return {
            self.codes: Slot((outputs, inputs // 2), torch.uint8),
            "weight_scale": Slot((outputs, inputs // NV_BLOCK), E4M3),
            self.whole: Slot(() if stored.get(self.whole) == () else (1,), FLOAT),
        }

    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        whole = tensors[self.whole].float().reshape(1)
        if not 0.0 < float(whole) < float("inf"):
            raise refuse(f"{self.whole} is {float(whole)}, which is no scale")
        table = torch.tensor(E2M1, device=whole.device)
        table = table / whole if self.is_divisor else table * whole
        halves = tensors["weight_scale"].to(torch.float16)
        return Grouped(
            *(nibbles(tensors[self.codes]), halves.float(), NV_BLOCK, 4),
            table=table,
            shared=SharedScales(1, halves),
        )

    def part(
        self, outputs: int, inputs: int, tensors: Tensors, part: Part
    ) -> dict[str, torch.Tensor] | None:
        blocks = part.each(NV_BLOCK, inputs) if part.dim else slice(part.run.start, part.run.stop)
        if blocks is None:
            return None
        codes, scales = tensors[self.codes], tensors["weight_scale"]
        if part.dim == 0:
            cut = {self.codes: codes[blocks], "weight_scale": scales[blocks]}
        else:
            octets = slice(part.run.start // 2, part.run.stop // 2)
            cut = {self.codes: codes[:, octets], "weight_scale": scales[:, blocks]}
        return {**tensors, **cut}


@dataclass(frozen=True)
class Plain(Format):
    """Weights of 8 bits as they are, int8 or e4m3, with a scale per output, layer or block."""

    scale: str = "weight_scale"
    dtype: torch.dtype = torch.int8
    block: int | None = None  # outputs that share a scale, beside the inputs of a group
    divisor: float = 1.0  # of scales

    @property
    def label(self) -> str:
        """The format in words, for the log."""
        kind = "int8" if self.dtype == torch.int8 else "fp8"
        blocks = "" if self.group is None else f", blocks of {self.block} x {self.group}"
        return f"{self.method} {kind}{blocks}"

    def as_stored(self, names: Iterable[str]) -> "Plain":
        # Writers of fp8 have two names of a scale.
        if self.scale in names:
            return self
        named = [name for name in ("weight_scale", "weight_scale_inv") if name in names]
        return replace(self, scale=named[0]) if named else self

    def slots(
        self, outputs: int, inputs: int, stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Slot]:
        scale: tuple[int | None, ...]
        if self.group is not None and self.block is not None:
            scale = (groups_of(outputs, self.block), groups_of(inputs, self.group))
        else:  # of each output, or of all: as [], [1], [outputs] or [outputs, 1]
            shapes: list[tuple[int, ...]] = [(), (1,), (1, 1), (outputs,), (outputs, 1)]
            shape = stored.get(self.scale, (outputs, 1))
            scale = shape if shape in shapes else (outputs, 1)
        return {"weight": Slot((outputs, inputs), self.dtype), self.scale: Slot(scale, FLOAT)}

    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        scale = tensors[self.scale].float() / self.divisor
        if self.group is not None and self.block is not None:
            scale = scale.repeat_interleave(self.block, dim=0)[:outputs]
        else:
            scale = scale.reshape(-1, 1).expand(outputs, 1)
        return Grouped(tensors["weight"], scale.contiguous(), self.width(inputs), 8)

    def part(
        self, outputs: int, inputs: int, tensors: Tensors, part: Part
    ) -> dict[str, torch.Tensor] | None:
        here, scale = slice(part.run.start, part.run.stop), tensors[self.scale]
        weight = tensors["weight"][here] if part.dim == 0 else tensors["weight"][:, here]
        if self.group is not None and self.block is not None:
            blocks = part.each((self.block, self.group)[part.dim], (outputs, inputs)[part.dim])
            if blocks is None:
                return None
            scale = scale[blocks] if part.dim == 0 else scale[:, blocks]
        elif part.dim == 0 and scale.numel() > 1:
            scale = scale[here]
        return {"weight": weight, self.scale: scale}


@dataclass(frozen=True)
class Nf4(Format):
    """bitsandbytes' 4 bits: two codes in a byte, the first in its upper half, and a table.

    The largest magnitudes of the blocks may be quantised themselves (QLoRA; Dettmers et al., 2023).
    """

    label = "bitsandbytes 4 bits, blocks"

    def slots(
        self, outputs: int, inputs: int, stored: Mapping[str, tuple[int, ...]]
    ) -> dict[str, Slot]:
        slots = {
            "weight": Slot((-(-outputs * inputs // 2), 1), torch.uint8),
            "weight_quant_map": Slot((16,), FLOAT),
            "weight_quant_state": Slot((None,), torch.uint8),
        }
        nested = "weight_nested_absmax" in stored
        slots["weight_absmax"] = Slot((None,), torch.uint8 if nested else FLOAT)
        if nested:
            slots["weight_nested_absmax"] = Slot((None,), FLOAT)
            slots["weight_nested_quant_map"] = Slot((256,), FLOAT)
        return slots

    def grouped(self, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
        state = json.loads(bytes(tensors["weight_quant_state"].cpu().tolist()))
        block = int(state["blocksize"])
        if inputs % block:
            raise refuse(f"{inputs} inputs are not whole blocks of {block}")
        absmax = tensors["weight_absmax"]
        if (nested := tensors.get("weight_nested_absmax")) is not None:
            spread = nested.repeat_interleave(int(state["nested_blocksize"]))[: len(absmax)]
            absmax = tensors["weight_nested_quant_map"][absmax.long()] * spread
            absmax = absmax + float(state["nested_offset"])
        codes = tensors["weight"].flatten()
        values = torch.stack([codes >> 4, codes & 15], dim=-1).view(outputs, inputs)
        scale = absmax.float().view(outputs, inputs // block)
        return Grouped(values, scale, block, 4, table=tensors["weight_quant_map"])

    def part(
        self, outputs: int, inputs: int, tensors: Tensors, part: Part
    ) -> dict[str, torch.Tensor] | None:
        state = json.loads(bytes(tensors["weight_quant_state"].tolist()))
        block, sliced = int(state["blocksize"]), dict(tensors)
        if part.dim == 1 or inputs % block:  # numbers lie output after output
            return None
        first, count = part.run.start * inputs, len(part.run) * inputs
        blocks = slice(first // block, (first + count) // block)
        if "weight_nested_absmax" in sliced:
            each = int(state["nested_blocksize"])
            if blocks.start % each:
                return None
            sliced["weight_nested_absmax"] = sliced["weight_nested_absmax"][blocks.start // each :]
        sliced["weight"] = sliced["weight"][first // 2 : (first + count) // 2]
        sliced["weight_absmax"] = sliced["weight_absmax"][blocks]
        return sliced


def mxfp4_groups(blocks: torch.Tensor, scales: torch.Tensor) -> Grouped:
    """Microscaling 4-bit floats (OCP MX 1.0): [N, G, 16] uint8, [N, G] uint8 exponents.

    A weight [N, 32 * G]; the first of two codes in a byte is its lower half.
    """
    scale = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - 127)
    table = torch.tensor(E2M1, device=blocks.device)
    return Grouped(nibbles(blocks), scale, MX_BLOCK, 4, table=table)


def nibbles(octets: torch.Tensor) -> torch.Tensor:
    """Takes 4-bit codes out of bytes, the lower half first: [N, ..., B] -> [N, 2 * ... * B]."""
    return torch.stack([octets & 15, octets >> 4], dim=-1).flatten(1)


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of such blocks: [N, 32 * G] float32."""
    return mxfp4_groups(blocks, scales).dense()
