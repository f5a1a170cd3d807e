"""Quantised layers on the Triton kernels, their weights as small as in the checkpoint.

Plain layers can be rounded to as few bits when they are loaded.
"""

import logging
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from rayfin.actors.runner.quantized.linear import SmallLinear
from rayfin.actors.runner.quantized.loader import quant_linears
from rayfin.kernels.grouped import round_weight
from rayfin.kernels.triton.quantized import CodedWeight, pack_weight, product, stack_weights

logger = logging.getLogger(__name__)

GATES = ("gate", "router")
"""How names of layers end that choose experts or weigh them, which are small and matter."""


class TritonLinear(SmallLinear):
    """y = x W^T + b of a weight of codes, each rounded once to the dtype of x.

    Nothing waits for the device, so that CUDA graphs record it.
    """

    def __init__(self, codes: CodedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes = codes
        self.out_features, self.in_features = codes.outputs, codes.inputs
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.weight = torch.empty(codes.outputs, codes.inputs, dtype=dtype, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        y = product(x.reshape(-1, x.shape[-1]), self.codes, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


@torch.no_grad()
def pack_quantized(model: nn.Module) -> int:
    """Replaces the quantised layers, one after the other, and returns the bytes of their weights.

    So the device holds one layer's numbers at most beside the codes. Layers of codes that the
    kernels do not read become plain.
    """
    layers, plain, size = quant_linears(model), 0, 0
    while layers:
        owner, name, layer = layers.pop()
        codes = pack_weight(layer.grouped())
        if codes is None:
            plain += 1
            setattr(owner, name, layer.dequantized())
            continue
        size += codes.bytes
        setattr(owner, name, TritonLinear(codes, layer.bias, layer.dtype))
    if size:
        logger.info("quantized weights stay in %d MiB of the GPU", size >> 20)
    if plain:
        logger.warning("%d layers of codes that no kernel reads are plain", plain)
    return size


@torch.no_grad()
def round_linears(model: PreTrainedModel, bits: int) -> int:
    """Rounds the plain linear layers in place, one after the other, and returns how many.

    The head stays, and with it the embedding, and so do experts and gates. Rows are not rounded.
    """
    head, count = model.get_output_embeddings(), 0  # type: ignore[no-untyped-call]
    for owner in list(model.modules()):
        for name, layer in list(owner.named_children()):
            if type(layer) is not nn.Linear or layer is head or name.endswith(GATES):
                continue
            codes = pack_weight(round_weight(layer.weight, bits))
            assert codes is not None
            setattr(owner, name, TritonLinear(codes, layer.bias, layer.weight.dtype))
            count += 1
    return count


def merged(layers: Sequence[TritonLinear]) -> CodedWeight | None:
    """One weight of the layers, which keep a part of it each; None if they are not alike."""
    if len(layers) == 1:
        return layers[0].codes
    whole, start = stack_weights([layer.codes for layer in layers]), 0
    if whole is None:
        return None
    for layer in layers:
        layer.codes = whole.part(start, layer.out_features)
        start += layer.out_features
    return whole
