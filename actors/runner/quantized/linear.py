"""A linear layer whose weight stays as the checkpoint stores it."""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.quantized.formats import Format, Slot, Tensors
from rayfin.kernels.grouped import Grouped


def grouped(name: str, format: Format, outputs: int, inputs: int, tensors: Tensors) -> Grouped:
    """The weight [outputs, inputs] of the layer ``name``.

    Raises:
        InvalidConfig: The tensors contradict each other.
    """
    try:
        return format.grouped(outputs, inputs, tensors)
    except (InvalidConfig, ValueError, KeyError, RuntimeError) as error:
        raise InvalidConfig(f"the checkpoint's {name}: {error}", "quantization") from None


def inside_head(model: PreTrainedModel) -> set[nn.Module]:
    """The layer of logits, with what a rank's share of it is made of."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return set() if head is None else set(head.modules())


class SmallLinear(nn.Module):
    """A layer on a device's own kernels, its weight of few bits. Each device has a subclass."""

    in_features: int
    out_features: int
    weight: torch.Tensor  # of no memory (meta): some models ask for its type
    bias: nn.Parameter | None


class QuantLinear(nn.Module):
    """Buffers under the names of the checkpoint, and a slow and obvious product: the reference.

    Fast kernels take ``grouped()``; `dequantized()` is a plain layer of the same numbers.
    """

    def __init__(
        self,
        name: str,
        outputs: int,
        inputs: int,
        format: Format,
        slots: Mapping[str, tuple[Slot, tuple[int, ...]]],  # with the stored shapes
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.name, self.out_features, self.in_features = name, outputs, inputs
        self.format, self.dtype = format, dtype
        self._slots = tuple(slots)
        device = "meta" if bias is None else bias.device
        for slot, (kind, shape) in slots.items():
            self.register_buffer(slot, torch.empty(shape, dtype=kind.dtype, device=device))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def grouped(self) -> Grouped:
        """The weight [outputs, inputs] as codes, scales and zero points.

        Raises:
            InvalidConfig: The tensors contradict each other.
        """
        tensors = {slot: self.get_buffer(slot) for slot in self._slots}
        return grouped(self.name, self.format, self.out_features, self.in_features, tensors)

    def weight_in(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [outputs, inputs], rounded to ``dtype``."""
        return self.grouped().dense().to(dtype)

    @property
    def bytes(self) -> int:
        """The size of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def dequantized(self) -> nn.Linear:
        """A plain layer with these weights."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight_in(self.dtype), requires_grad=False)
        linear.bias = self.bias  # type: ignore[assignment]
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return nn.functional.linear(x, self.weight_in(x.dtype), self.bias)
