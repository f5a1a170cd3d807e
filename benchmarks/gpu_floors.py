"""Lower bounds of a chip: the bytes that must be read and the operations that must be done.

A decode step reads every weight once and the keys and values of every row; a prompt costs two
operations for each weight and token. Launches, attention's operations and reads of activations are
left out: it is a floor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BYTES = 2  # of a weight, a key, a value


@dataclass(frozen=True)
class Floors:
    """The lower bounds of one shape on one chip."""

    layer_weights: int  # of all layers
    head_weights: int
    kv_bytes: int  # of a token, all layers
    bandwidth: float  # bytes/s
    flops: float

    @classmethod
    def of(cls, sizes: dict[str, Any], bandwidth: float, flops: float) -> "Floors":
        """The bounds of a dense decoder of these sizes (``SHAPES``) in 16 bits."""
        hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
        heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        head_dim = sizes.get("head_dim", hidden // heads)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        layer = attention + 3 * hidden * sizes["intermediate_size"]
        kv_bytes = 2 * layers * kv_heads * head_dim * BYTES
        return cls(layers * layer, hidden * sizes["vocab_size"], kv_bytes, bandwidth, flops)

    def decode(self, contexts: Sequence[int]) -> float:
        """Seconds of a step whose rows see this many tokens each."""
        weights = self.layer_weights + self.head_weights
        read = weights * BYTES + sum(contexts) * self.kv_bytes
        return max(read / self.bandwidth, 2 * weights * len(contexts) / self.flops)

    def prefill(self, tokens: int) -> float:
        """Seconds of prompts with this many tokens in total."""
        return 2 * self.layer_weights * tokens / self.flops

    def run(self, shapes: Sequence[tuple[int, int]]) -> float:
        """Seconds of requests of (prompt, output) tokens, all at once, with room for all."""
        seconds = self.prefill(sum(prompt for prompt, _ in shapes))
        for step in range(1, max(output for _, output in shapes)):
            contexts = [prompt + step for prompt, output in shapes if output > step]
            seconds += self.decode(contexts)
        return seconds
