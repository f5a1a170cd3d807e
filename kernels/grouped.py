"""A weight of a few bits: codes, and a scale and a zero point for each group of inputs.

Every format of a quantised checkpoint comes down to this one (GPTQ: Frantar et al., 2022; AWQ: Lin
et al., 2023), and the kernels read nothing else.
"""

from dataclasses import dataclass

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The table of 4-bit floats: a sign, 2 bits of exponent, 1 of mantissa."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedScales:
    """Scales, and perhaps least numbers, as 16-bit floats that ``span`` groups share.

    Each group has a factor on them, or ``span`` is 1. Products are exact in float32.
    """

    span: int  # a power of two
    scale: torch.Tensor  # [N, S] float16
    factors: torch.Tensor | None = None  # [N, G] int8
    least: torch.Tensor | None = None  # [N, S] float16
    least_factors: torch.Tensor | None = None  # [N, G] int8

    def scales(self) -> torch.Tensor:
        """[N, G] float32."""
        return self._spread(self.scale, self.factors)

    def leasts(self) -> torch.Tensor | None:
        """[N, G] float32."""
        return None if self.least is None else self._spread(self.least, self.least_factors)

    def _spread(self, halves: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
        floats = halves.float()
        if factors is None:
            return floats
        shared = floats.repeat_interleave(self.span, dim=1)[:, : factors.shape[1]]
        return shared * factors.float()


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """The weight (value - zero) * scale of each output and input, or table[value] * scale.

    Or value * scale + least, where value * scale has to be exact in float32.
    """

    values: torch.Tensor  # [N, K] uint8 codes, int8 or float8_e4m3fn
    scale: torch.Tensor  # [N, G] float32
    group: int  # inputs that share a scale; the last group may be shorter
    bits: int
    zero: torch.Tensor | None = None  # [N, G] int32; None: 0
    table: torch.Tensor | None = None  # [2^bits] float32, the numbers that codes stand for
    order: torch.Tensor | None = None  # [K] int64: values[:, i] belong to input order[i]
    least: torch.Tensor | None = None  # [N, G] float32, the number that code 0 stands for
    shared: SharedScales | None = None  # the same scales and least numbers in fewer bytes

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.values.shape[0], self.values.shape[1]

    def dense(self) -> torch.Tensor:
        """The weight [N, K] float32, inputs in their own order."""
        inputs = self.shape[1]

        def spread(groups: torch.Tensor) -> torch.Tensor:
            return groups.repeat_interleave(self.group, dim=1)[:, :inputs]

        if self.table is not None:
            weight = self.table[self.values.int()]
        else:
            weight = self.values.float()
        if self.zero is not None:
            weight = weight - spread(self.zero.float())
        weight = weight * spread(self.scale)
        if self.least is not None:
            weight = weight + spread(self.least)
        if self.order is None:
            return weight
        ordered = torch.empty_like(weight)
        ordered[:, self.order] = weight
        return ordered


ROUNDED_GROUP = 64
"""Inputs that share a scale in weights that are rounded to 4 bits."""

SCALE_FACTORS = (1.0, 1.0625, 0.9375, 0.875, 0.8125, 0.75)
"""On the scale that makes a group's largest number -8; the first of the least errors wins."""


def round_weight(weight: torch.Tensor, bits: int) -> Grouped:
    """A plain weight [N, K] rounded to 8 bits with a scale per output, or to 4, for a GPU."""
    outputs, inputs = weight.shape
    numbers = weight.detach().float()
    if bits == 8:
        scale = numbers.abs().amax(dim=1, keepdim=True) / 127
        codes = torch.where(scale > 0, numbers / scale, 0.0).round()
        return Grouped(codes.to(torch.int8), scale, inputs, 8)
    group = min(ROUNDED_GROUP, inputs)
    numbers = torch.nn.functional.pad(numbers, (0, -inputs % group)).view(outputs, -1, group)
    peak = numbers.gather(2, numbers.abs().argmax(dim=2, keepdim=True))
    peak = torch.where(peak.abs() >= 1e-30, peak, 0.0)
    best, least = torch.zeros_like(peak), torch.full_like(peak, torch.inf)
    for factor in SCALE_FACTORS:
        scale = peak / -8 * factor
        error = (numbers - _codes_in(numbers, scale) * scale).square().sum(2, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    values = (_codes_in(numbers, best) + 8).to(torch.uint8).flatten(1)[:, :inputs]
    scale = best.squeeze(2)
    zero = torch.full(scale.shape, 8, dtype=torch.int32, device=scale.device)
    return Grouped(values.contiguous(), scale, group, 4, zero)


def _codes_in(numbers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, numbers * (1 / scale)).round().clamp(-8, 7)


def unpack_bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[R, C] int32 -> [R, C * 32 / bits] uint8: the lowest bits of a word come first.

    ``bits`` divides 8.
    """
    octets = words.contiguous().view(torch.uint8)
    steps = [(octets >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.stack(steps, dim=-1).flatten(-2)
