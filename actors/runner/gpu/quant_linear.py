"""Quantised layers on the Triton kernels, their weights as small as in the checkpoint."""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from rayfin.actors.runner.quantized.linear import SmallLinear
from rayfin.actors.runner.quantized.loader import quant_linears
from rayfin.kernels.triton.quantized import CodedWeight, pack_weight, product, stack_weights

logger = logging.getLogger(__name__)


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
