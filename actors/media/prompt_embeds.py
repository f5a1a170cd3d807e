"""Embeddings in place of tokens of a prompt, as an ingress reads them."""

from dataclasses import dataclass, replace

from rayfin.actors.media.embeds_part import EmbedsInput
from rayfin.actors.messages import Int32Array


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Embeddings in place of N tokens of a prompt."""

    ids: Int32Array  # [N] of the tokens that they stand for, which depend on them alone
    sent: EmbedsInput

    def at(self, start: int) -> "PromptEmbeds":
        """The same from this position of the prompt on."""
        return replace(self, sent=replace(self.sent, start=start))
