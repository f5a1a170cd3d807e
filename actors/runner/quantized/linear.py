"""Layers whose weight stays as the checkpoint stores it: linear ones, and embeddings."""

from abc import ABC, abstractmethod
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

    @property
    def rounds_rows(self) -> bool:
        """Whether some products round their rows to 8 bits."""
        return False


class SmallEmbedding(nn.Module, ABC):
    """An embedding whose table is of few bits, and perhaps a factor on what it gives."""

    num_embeddings: int
    embedding_dim: int
    scale: float
    weight: torch.Tensor  # of no memory (meta): some models ask for its type

    @abstractmethod
    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the table: [...] int64 -> [..., embedding_dim]."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., embedding_dim]."""
        return _scaled(self.rows(tokens), self.scale)


class QuantWeight(nn.Module):
    """Buffers under the names of the checkpoint."""

    def __init__(
        self,
        name: str,
        outputs: int,
        inputs: int,
        format: Format,
        slots: Mapping[str, tuple[Slot, tuple[int, ...]]],  # with the stored shapes
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.name, self.out_features, self.in_features = name, outputs, inputs
        self.format, self.dtype = format, dtype
        self._slots = tuple(slots)
        for slot, (kind, shape) in slots.items():
            self.register_buffer(slot, torch.empty(shape, dtype=kind.dtype, device=device))

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

    def rows(self, outputs: torch.Tensor) -> torch.Tensor:
        """Some rows [..., inputs] of the weight; for formats whose tensors have a row for each."""
        tensors = {slot: self.get_buffer(slot)[outputs.flatten()] for slot in self._slots}
        weight = grouped(self.name, self.format, outputs.numel(), self.in_features, tensors)
        return weight.dense().to(self.dtype).view(*outputs.shape, self.in_features)

    @property
    def bytes(self) -> int:
        """The size of the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers())


class QuantLinear(QuantWeight):
    """A slow and obvious product: the reference.

    Fast kernels take ``grouped()``; `dequantized()` is a plain layer of the same numbers.
    """

    def __init__(
        self,
        name: str,
        outputs: int,
        inputs: int,
        format: Format,
        slots: Mapping[str, tuple[Slot, tuple[int, ...]]],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        device = "meta" if bias is None else bias.device
        super().__init__(name, outputs, inputs, format, slots, device, dtype)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def dequantized(self) -> nn.Linear:
        """A plain layer with these weights."""
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(self.weight_in(self.dtype), requires_grad=False)
        linear.bias = self.bias  # type: ignore[assignment]
        return linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return nn.functional.linear(x, self.weight_in(x.dtype), self.bias)


class QuantEmbedding(QuantWeight):
    """An embedding of a quantised table: tokens [...] -> [..., embedding_dim]. The reference."""

    scale: float = 1.0

    @property
    def table(self) -> QuantWeight:
        """The weight whose rows it gives."""
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., inputs]."""
        return _scaled(self.rows(tokens), self.scale)


class HeadEmbedding(nn.Module):
    """An embedding whose table is the head's weight."""

    def __init__(self, head: QuantLinear, scale: float) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple: it is no part of this module
        self.scale = scale

    @property
    def table(self) -> QuantWeight:
        """The weight whose rows it gives."""
        return self._head[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., inputs]."""
        return _scaled(self.table.rows(tokens), self.scale)


class ScaledEmbedding(nn.Embedding):
    """A plain embedding with a factor on what it gives."""

    def __init__(self, weight: torch.Tensor, scale: float) -> None:
        super().__init__(weight.shape[0], weight.shape[1], device="meta")
        self.weight, self.scale = nn.Parameter(weight, requires_grad=False), scale

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] int64 -> [..., embedding_dim]."""
        return _scaled(super().forward(tokens), self.scale)


def embedding_scale(module: nn.Module) -> float | None:
    """The factor on what a plain embedding gives (Gemma has one); None of another kind."""
    if type(module) is nn.Embedding:
        return 1.0
    scale = getattr(module, "scalar_embed_scale", None)
    return float(scale) if isinstance(module, nn.Embedding) and scale is not None else None


def _scaled(rows: torch.Tensor, scale: float) -> torch.Tensor:
    """``rows`` times the scale, which has their dtype."""
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)
