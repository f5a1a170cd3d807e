"""Which weights an engine computes by."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rayfin.actors.errors import EngineBusy
from rayfin.actors.model_files.digests import weight_files
from rayfin.actors.parts import RequestPart

BASE_LABEL = "default"
"""The label of the weights that an engine has started with, as vLLM and SGLang name them."""

PauseMode = Literal["keep", "wait", "abort"]
"""What running requests do while an engine pauses: they freeze, finish before, or end."""

KeptPages = Literal["recompute", "keep"]
"""What becomes of their keys and values with new weights: computed again, or those of before."""

NewRequests = Literal["wait", "refuse"]
"""What requests do that come meanwhile."""


EngineOrder = Literal["together", "in_turn"]
"""Which engines pause: all, so that one version serves; or one after the other."""


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Weights by number, name and content; without fields those that the engine started with."""

    serial: int = 0  # rises by 1 with each commit of a deployment
    label: str = BASE_LABEL  # the trainer's name of it
    digest: str = ""  # of its tensors (model_files/digests.py)
    place: str = ""  # a safetensors file, or a folder of them; empty: the model's own files

    @property
    def is_base(self) -> bool:
        """Whether these are the weights of the model's own files."""
        return not self.place

    @property
    def files(self) -> list[Path]:
        """Its safetensors files.

        Raises:
            InvalidConfig: the index of its folder cannot be read.
        """
        path = Path(self.place)
        return weight_files(path) if path.is_dir() else [path]

    def as_json(self) -> str:
        """Itself as a JSON object."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> "WeightVersion":
        """What ``as_json`` gave.

        Raises:
            ValueError, TypeError, KeyError: the text is another one.
        """
        values = json.loads(text)
        return cls(int(values["serial"]), *(str(values[key]) for key in TEXTS))


@dataclass(frozen=True, slots=True)
class WantedWeights(RequestPart):
    """A request that begins with weights of this label, or not at all."""

    label: str

    def require(self, version: WeightVersion) -> None:
        """Compares it with what an engine serves.

        Raises:
            EngineBusy: that is another one.
        """
        if self.label != version.label:
            raise EngineBusy(
                f"this engine serves the weights {version.label!r}, not {self.label!r}",
                "weight_version",
            )


TEXTS = ("label", "digest", "place")


@dataclass(frozen=True, slots=True)
class Vote:
    """An engine's yes to a version: it can serve it."""

    in_place: bool  # into the matrices as they lie; False: by runners that load it
    kept: Sequence[str] = ()  # tensors of the model's files that the version lacks, and that stay


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """What an engine says of its weights."""

    version: WeightVersion
    proposed: int | None  # number of the version that it has voted for
    paused: bool
    pausing: bool  # it is paused, or will be
    leaving: bool = False  # its requests go to other engines, until it is resumed
    requests: int = 0  # that it has


@dataclass(frozen=True, slots=True)
class WeightOrder:
    """What a coordinator asks of an engine; it answers with its ``EngineWeights``."""

    what: Literal["state", "pause", "commit", "resume", "drop", "leave", "hand_back"]
    mode: PauseMode = "keep"
    new: NewRequests = "wait"
    pages: KeptPages = "recompute"
    version: WeightVersion = WeightVersion()  # to commit
