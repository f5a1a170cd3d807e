"""What a request wants of its prompt's hidden states, as a part of it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from rayfin.actors.parts import RequestPart

PoolingTask: TypeAlias = Literal["embed", "classify", "token_embed", "token_classify"]


@dataclass(slots=True, frozen=True)
class Pooling(RequestPart):
    """What a request wants of its prompt's hidden states, in place of tokens."""

    task: PoolingTask = "embed"
    whole: bool = False  # it takes the states of all tokens: no page of the prefix index helps it
    skip: int = 0  # leading tokens that are left out (an instruction)
    second: int | None = None  # tokens from here on are of the second text of a pair

    samples = False

    @property
    def computes_all(self) -> bool:
        return self.whole
