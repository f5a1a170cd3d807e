"""A decoder that runs as one call of the compiled kernels per step.

``build_decoder.py`` makes it of a transformers model, ``stored_decoder.py`` of packed weights. This
module imports none of transformers: a start from packed weights needs none of its modelling code.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.models.step_model import Tables
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.cpu.decoder import PackedDecoder, StepAdapters
from rayfin.kernels.cpu.low_rank import Places

FIRST_POSITIONS = 2048


class CpuDecoder:
    """A ``StepModel`` on the compiled kernels."""

    def __init__(
        self,
        decoder: PackedDecoder,
        rotate: Callable[[int], Tables],  # number of positions -> rotary tables
        rotate_at: Callable[[torch.Tensor], Tables],  # positions [3, T] -> rows of such tables
        layouts: list[KVLayout],
        dtype: torch.dtype,
        places: Places = (),
    ) -> None:
        self.packed = decoder
        self.rotate, self._rotate_at = rotate, rotate_at
        self.layouts = layouts
        self.places = places  # of the linear layers, for adapters
        self.dtype = dtype  # of the pages, unless the configuration sets another

    @property
    def embedding_scale(self) -> float:
        """What the embeddings of tokens are multiplied with; given inputs are not."""
        return self.packed.shape.embedding_scale

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""
        self.packed.bind(cache.keys, cache.values, cache.group)

    def tap(self, layers: Sequence[int]) -> Callable[[], torch.Tensor]:
        """Makes steps keep the inputs of the ``layers``; returns what gives those of the last step.

        The number of layers stands for what the last one gives, before the norm.

        They are [T, len(layers) * hidden] float32.
        """
        self.packed.tap(layers)
        return lambda: self.packed.tapped

    def tap_last(self) -> Callable[[], torch.Tensor]:
        """The same of what the last norm gives: [T, hidden] float32."""
        self.packed.tap([len(self.layouts)])
        return lambda: self.packed.normed(self.packed.tapped)

    def score(self, states: torch.Tensor) -> torch.Tensor:
        """The logits [..., V] float32 of what the last norm gives, [..., hidden]; not capped."""
        logits = self.packed.score(states.reshape(-1, states.shape[-1]).float().contiguous())
        return logits.view(*states.shape[:-1], -1)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The stored embeddings [..., hidden] float32 of the ``tokens``."""
        rows = self.packed.embedding.rows(tokens.reshape(-1).contiguous())
        return rows.view(*tokens.shape, -1)

    def forward(self, inputs: StepInputs, adapters: StepAdapters | None = None) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        longest = int(np.max(inputs.batch.kv_len_cpu, initial=0))
        if longest > self.packed.positions:
            positions = max(FIRST_POSITIONS, 2 * self.packed.positions, longest)
            self.packed.set_rope_tables(self.rotate(positions))
        if inputs.given is None and inputs.rope_positions is None:
            tokens, sampled = inputs.input_ids, inputs.sampled
            return self.packed.run(tokens, inputs.batch, sampled, adapters=adapters)
        return self._run_given(inputs, adapters)

    def _run_given(self, inputs: StepInputs, adapters: StepAdapters | None) -> torch.Tensor:
        """A step with parts of images or given embeddings, or with text behind images."""
        tokens, batch, given, added = inputs.input_ids, inputs.batch, None, None
        if inputs.given is not None:
            given = inputs.given.states.float().contiguous()
            if inputs.given.added is not None:
                added = inputs.given.added.float().contiguous()
            tokens = tokens.clone()
            tokens[inputs.given.index] = -1 - torch.arange(len(given))
        rope = inputs.rope_positions
        if rope is None:
            return self.packed.run(tokens, batch, inputs.sampled, given, added, adapters=adapters)
        if bool((rope == rope[0]).all()):  # text behind images has positions of the common tables
            batch = replace(batch, positions=rope[0].contiguous())
            return self.packed.run(tokens, batch, inputs.sampled, given, added, adapters=adapters)
        return self.packed.run(
            tokens,
            replace(batch, positions=torch.arange(len(tokens))),
            inputs.sampled,
            given,
            added,
            self._rotate_at(rope),
            adapters,
        )


def compiled_decoder(model: object) -> CpuDecoder | None:
    """Returns the compiled decoder that a model is, or is put around; None if there is none."""
    inner = getattr(model, "decoder", model)
    return inner if isinstance(inner, CpuDecoder) else None
