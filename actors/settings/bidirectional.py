"""Parts of prompts that no step cuts, because their tokens see each other both ways."""

from dataclasses import dataclass

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.settings.choices import SeesAhead

TEXT_TOKENS = 256
"""Of a prompt that is never cut, beside an image, unless ``max_batch_tokens`` is given."""


@dataclass(frozen=True, slots=True)
class Bidirectional:
    """What of a prompt has to be computed in one step."""

    ahead: SeesAhead = "nothing"
    image_tokens: int = 0  # of an image of ordinary size
    room: int = 0  # most tokens that a step surely has for it

    def spans(self, images: list[tuple[int, int]], prompt_len: int) -> list[tuple[int, int]]:
        """First and past-the-last positions of such parts, given those of images."""
        if self.ahead == "prompt":
            return [(0, prompt_len)]
        return images if self.ahead == "image" else []

    def batch_tokens(self, given: int | None, usual: int, decoding: int) -> int:
        """Tokens of a step that holds such a part beside ``decoding`` rows.

        Raises:
            InvalidConfig: those that are ``given`` do not.
        """
        if self.ahead == "nothing":
            return given or max(usual, decoding)
        needed = decoding + self.image_tokens
        if given is None:
            return max(usual, needed + (TEXT_TOKENS if self.ahead == "prompt" else 0))
        if given < needed:
            raise InvalidConfig(
                f"max_batch_tokens ({given}) must be at least {needed}: an image of this model has "
                f"{self.image_tokens} tokens, which are computed in one step beside up to "
                f"{decoding} that decode (max_decoding_batch)",
                "max_batch_tokens",
            )
        return given


ANY = Bidirectional()
"""Nothing: prompts are cut anywhere."""
