"""A recognized decoder with exact weights of one layer at a time, for comparing before rounding.

It gives the logits that the whole decoder would give, so a model is compared with transformers'
before its weights are rounded, and its exact weights are never in memory together.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.models.inspect_decoder import DecoderSpec
from rayfin.actors.runner.models.mapped_weights import stored
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.cpu.decoder import DecoderLayer, PackedDecoder
from rayfin.kernels.cpu.kernels import CpuKernels

HEAD_BLOCK = 1 << 22
"""Weights of the head that are packed at once."""


class LayerByLayer:
    """A ``ManySteps`` that packs each layer, runs it for all steps, and forgets it.

    Args:
        pack: layer -> its exact weights.
    """

    def __init__(
        self,
        kernels: CpuKernels,
        parts: DecoderSpec,
        pack: Callable[[int], DecoderLayer],
        layouts: list[KVLayout],
        dtype: torch.dtype,
    ) -> None:
        self._kernels, self._parts, self._pack = kernels, parts, pack
        self.layouts, self.dtype = layouts, dtype
        self._cache: KVTensors | None = None

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""
        self._cache = cache

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] float32 of the tokens at ``inputs.sampled``."""
        return self.forward_each([inputs])[0]

    @torch.inference_mode()
    def forward_each(self, steps: Sequence[StepInputs]) -> list[torch.Tensor]:
        """The same of steps that follow one another."""
        parts = self._parts
        embedding, scale = parts.embedding.weight, parts.shape.embedding_scale
        rows = [embedding[step.input_ids].float() * scale for step in steps]
        longest = max(int(max(step.batch.kv_len_cpu, default=0)) for step in steps)
        tables = parts.rotate(longest)
        for index in range(len(parts.layers)):
            layer = self._layer(index)
            layer.set_rope_tables(tables)
            for at, step in enumerate(steps):
                layer.run(_given(rows[at]), step.batch, _NONE, rows[at].contiguous())
                rows[at] = layer.tapped
            del layer  # before the next one is packed
        return [self._logits(row[step.sampled]) for row, step in zip(rows, steps, strict=True)]

    def _layer(self, index: int) -> PackedDecoder:
        """One layer as a decoder, whose head is never asked."""
        assert self._cache is not None, "a step before its pages are bound"
        kernels, shape = self._kernels, replace(self._parts.shape, vocabulary=1)
        head = kernels.pack([torch.zeros(1, shape.hidden)])
        packed = self._pack(index)
        decoder = PackedDecoder(
            kernels, shape, [packed], embedding=head, head=head, final_norm=None
        )
        decoder.bind([self._cache.keys[index]], [self._cache.values[index]])
        decoder.tap([1])
        return decoder

    def _logits(self, rows: torch.Tensor) -> torch.Tensor:
        """[S, hidden] -> [S, V]."""
        parts, shape, kernels = self._parts, self._parts.shape, self._kernels
        weight, bias = stored(parts.head.weight), parts.head.bias
        x = kernels.rms_norm(rows.contiguous(), parts.final_norm, shape.eps)
        step, blocks = max(1, HEAD_BLOCK // shape.hidden), []
        for first in range(0, len(weight), step):
            block = kernels.pack([weight[first : first + step]])
            block_bias = None if bias is None else bias[first : first + step].float()
            blocks.append(kernels.matmul(x, block, bias=block_bias, alpha=shape.logit_scale))
        logits = torch.cat(blocks, dim=1)
        cap = shape.logit_softcap
        return torch.tanh(logits / cap) * cap if cap > 0 else logits


_NONE = torch.empty(0, dtype=torch.int64)


def _given(rows: torch.Tensor) -> torch.Tensor:
    """Tokens that stand for the ``rows``."""
    return -1 - torch.arange(len(rows))
