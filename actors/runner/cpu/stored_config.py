"""What a start from packed weights asks of a model's configuration, without its class.

transformers' configuration classes take longer to import than such a start takes besides. The
values are those of the class: they were kept with the weights when it was there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it takes a second
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class StoredConfig:
    """The part of a configuration that a runner reads once its model is loaded."""

    architectures: Sequence[str]
    vocab_size: int
    max_position_embeddings: int | None  # of the model, or None if it has no limit

    @classmethod
    def of(cls, config: "PretrainedConfig", positions: int | None) -> "StoredConfig":
        """That of a model that has ``positions`` positions at most."""
        return cls(
            architectures=config.architectures or [type(config).__name__],
            vocab_size=config.get_text_config(decoder=True).vocab_size,
            max_position_embeddings=positions,
        )

    def get_text_config(self, decoder: bool = True) -> "StoredConfig":
        """Itself: it is of a decoder of text."""
        return self
