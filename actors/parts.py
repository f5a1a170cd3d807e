"""What a request or a model has beside tokens: an interface between features and the core.

A feature's messages derive from these classes. The core passes them on, and reads of them only what
stands here. The defaults are those of a feature that asks nothing of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from rayfin.actors.settings.bidirectional import ANY, Bidirectional

P = TypeVar("P")


class RequestPart:
    """A part of a request beside its tokens; the ingress makes it, a part of the model reads it."""

    __slots__ = ()

    @property
    def key(self) -> str:
        """What keys and values depend on beside tokens; "" if the ids of its tokens say it all."""
        return ""

    @property
    def span(self) -> tuple[int, int] | None:
        """First and past-the-last position of tokens whose inputs are computed first, by a tower.

        None if it has none.
        """
        return None

    @property
    def needs_history(self) -> bool:
        """Whether the runner needs the request's tokens."""
        return False

    @property
    def by_reference(self) -> bool:
        """Whether it refers to Ray's object store: Ray must carry it, for it counts references."""
        return False

    @property
    def samples(self) -> bool:
        """Whether the request samples tokens; if not, it ends with ``StepResult.vectors``."""
        return True

    @property
    def computes_all(self) -> bool:
        """Whether all tokens of the prompt are computed, none taken from the cache."""
        return False

    @property
    def needs(self) -> "tuple[Need, ...]":
        """What runners prepare ahead for it."""
        return ()

    @property
    def quick(self) -> bool:
        """Whether a step prepares that in a few milliseconds: then no request waits for it."""
        return False

    def check(self, served: "Sequence[PartFacts]") -> None:
        """Checks that an engine serves it, of whose model these facts are known.

        Raises:
            InvalidRequest: it does not.
        """


@dataclass(frozen=True, slots=True)
class Need:
    """Something that runners prepare ahead of the requests that need it."""

    digest: bytes  # equal ones are prepared once
    what: object  # its feature's: the text of a grammar, an adapter


@dataclass(frozen=True, slots=True)
class PartFacts:
    """What engines and ingresses must know of a part of a model."""

    of: ClassVar[type[RequestPart]] = RequestPart  # what requests have of it

    num_bytes: int = 0  # kept for it, and not among those left for pages
    front_tokens: int = 0  # in front of each prompt; they do not count in max_model_len
    uncut: Bidirectional = ANY  # parts of prompts that no step cuts
    at_once: int | None = None  # most that differ by their key in one step; None: any number
    smaller: tuple[str, int] | None = None  # settings with which it takes so many bytes less


class PartUsage:
    """What a runner did for a feature since its last result."""

    __slots__ = ()

    @property
    def seconds_apart(self) -> float:
        """Time of a step that its tokens do not explain."""
        return 0.0


def first_of(parts: Iterable[object], kind: type[P]) -> P | None:
    """Returns the first of a kind, or None."""
    return next((part for part in parts if isinstance(part, kind)), None)


def all_of(parts: Iterable[object], kind: type[P]) -> tuple[P, ...]:
    """Returns all of a kind, in order."""
    return tuple(part for part in parts if isinstance(part, kind))


def uncut_of(parts: Iterable[PartFacts]) -> Bidirectional:
    """Returns what no step cuts: of the one part that has such."""
    return next((part.uncut for part in parts if part.uncut != ANY), ANY)


def front_tokens(parts: Iterable[PartFacts]) -> int:
    """Returns the tokens in front of each prompt."""
    return sum(part.front_tokens for part in parts)
