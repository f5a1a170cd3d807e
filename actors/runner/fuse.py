"""Fusing after load: a recognised decoder becomes one call of the compiled kernels per step.

The transformers model stays the authority. Its structure says which weights there are, a probe
through it says how each layer attends and how the embedding is scaled, and in the end both compute
the same prompt: if their logits differ, the fused one is dropped and the model runs as it is.
A model that is to be quantised is held to that with its exact weights first.
"""

import logging

import numpy as np
import torch
from torch import nn

from rayfin.actors.config import Quantization
from rayfin.actors.runner.fuse_decoder import Attending, read_decoder
from rayfin.actors.runner.fuse_layers import GatedParts, LayerParts, NotRecognised, norm_weight
from rayfin.actors.runner.fused_model import FusedModel
from rayfin.actors.runner.paged_model import PagedModel, StepModel
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.attention.interface import PagedBatch
from rayfin.kernels.cpu.decoder import DecoderLayer, PackedDecoder
from rayfin.kernels.cpu.kernels import CpuKernels, Matrix

logger = logging.getLogger(__name__)

CHECKED_TOKENS = 24
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""How far logits may be apart, as a share of the largest one."""


WEIGHTS: dict[Quantization | None, torch.dtype | None] = {None: None, "int8": torch.int8}
"""How weights are stored; None is as exactly as they came."""


def fuse(
    paged: PagedModel, kernels: CpuKernels, quantization: Quantization | None = None
) -> FusedModel | None:
    """The model on compiled kernels with the same results, or None if it is not recognised.

    With ``quantization``, results are what rounding makes of them.
    """
    name = type(paged.transformer).__name__
    try:
        fused = _build(paged, kernels, None)
    except NotRecognised as reason:
        logger.info("%s is not fused: %s", name, reason)
        return None
    difference = _difference(paged, fused)
    if difference > TOLERANCE[paged.dtype]:
        logger.warning("%s is not fused: logits would differ by %.1e", name, difference)
        return None
    if quantization:
        del fused  # its memory is needed
        return _build(paged, kernels, WEIGHTS[quantization])
    return fused


def _build(paged: PagedModel, kernels: CpuKernels, storage: torch.dtype | None) -> FusedModel:
    parts = read_decoder(paged)
    packed = [
        _pack_layer(kernels, part, how, parts.rotary[index], storage)
        for index, (part, how) in enumerate(zip(parts.layers, parts.attending, strict=True))
    ]
    embedding, lm_head = parts.embedding, parts.head
    head = kernels.pack([lm_head.weight], storage=storage)
    tied = lm_head.weight.data_ptr() == embedding.weight.data_ptr()
    return FusedModel(
        PackedDecoder(
            kernels,
            parts.shape,
            packed,
            embedding=head if tied else kernels.pack([embedding.weight]),
            head=head,
            final_norm=parts.final_norm,
            head_bias=_float(lm_head.bias),
        ),
        parts.rotate,
        paged.layouts,
        paged.dtype,
    )


def _pack_layer(
    kernels: CpuKernels,
    part: LayerParts,
    how: Attending,
    rotary: int,
    storage: torch.dtype | None,
) -> DecoderLayer:
    def vector(norm: nn.Module | None) -> torch.Tensor | None:
        weight = norm_weight(norm)
        return None if weight is None else weight[0]

    def pack(linears: list[nn.Linear], paired: bool = False) -> Matrix:
        weights = [linear.weight for linear in linears]
        return kernels.pack(weights, paired=paired, storage=storage)

    assert isinstance(part.mlp, GatedParts)  # experts were not asked for
    return DecoderLayer(
        qkv=pack(part.query_key_value),
        attention_out=pack([part.attention_out]),
        gate_up=pack(part.mlp.gate_up, paired=True),
        down=pack([part.mlp.down]),
        scale=how.scale,
        attention_norm=vector(part.attention_norm),
        attention_out_norm=vector(part.attention_out_norm),
        mlp_norm=vector(part.mlp_norm),
        mlp_out_norm=vector(part.mlp_out_norm),
        qkv_bias=_bias(part.query_key_value),
        attention_out_bias=_bias([part.attention_out]),
        gate_up_bias=_bias(part.mlp.gate_up),
        down_bias=_bias([part.mlp.down]),
        query_norm=vector(part.query_norm),
        key_norm=vector(part.key_norm),
        sinks=_float(how.sinks),
        window=how.window,
        softcap=how.softcap,
        rotary=rotary,
    )


def _bias(linears: list[nn.Linear]) -> torch.Tensor | None:
    """The merged bias; zeros where only some have one."""
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach().float()
        for linear in linears
    ]
    return torch.cat(biases).contiguous()


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _difference(paged: PagedModel, fused: FusedModel) -> float:
    """How far apart both models' logits are on one prompt, as a share of the largest."""
    logits = [probe_logits(model, paged) for model in (paged, fused)]
    scale = logits[0].abs().max().clamp(min=1e-6)
    difference = ((logits[0] - logits[1]).abs().max() / scale).item()
    return difference if difference == difference else float("inf")


def probe_logits(model: StepModel, paged: PagedModel) -> torch.Tensor:
    """The logits of all tokens of a chunk after half a prompt, on pages of its own."""
    page_size, half = 8, CHECKED_TOKENS // 2
    pages = CHECKED_TOKENS // page_size
    cache = KVTensors(paged.layouts, pages, page_size, paged.dtype, paged.device)
    model.bind(cache)
    vocabulary = paged.transformer.config.get_text_config(decoder=True).vocab_size
    device = paged.device
    tokens = (torch.arange(CHECKED_TOKENS, device=device) * 7919 + 11) % vocabulary
    logits = []
    for start in (0, half):
        positions = torch.arange(start, start + half, device=device)
        starts, lengths = np.array([0, half], np.int32), np.array([start + half], np.int32)
        batch = PagedBatch(
            query_start=torch.from_numpy(starts).to(device),
            kv_len=torch.from_numpy(lengths).to(device),
            page_tables=torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0),
            slots=positions,
            positions=positions,
            query_start_cpu=starts,
            kv_len_cpu=lengths,
            decoding=0,
            page_size=page_size,
        )
        every = torch.arange(half, device=device)
        logits.append(model.forward(tokens[start : start + half], batch, every))
    model.bind(KVTensors(paged.layouts, 0, page_size, paged.dtype, paged.device))
    return torch.cat(logits).float()
