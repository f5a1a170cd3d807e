"""Weights of a draft model or head, within the versions of the model that it drafts for.

Those of a folder of their own (an EAGLE head, a draft model) lie in a version's file behind a
prefix, and stay from version to version until others come. An MTP head has the names of the model's
checkpoint.
"""

from collections.abc import Iterable
from pathlib import Path

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.model_files.shards import read_header

PREFIX = "draft."
WITHIN = "mtp"


class DraftNames:
    """How the tensors of what drafts are named in versions of an engine.

    Args:
        draft: the tensors that come are those of what drafts, by its own names.

    Raises:
        InvalidRequest: ``draft``, and nothing drafts that has weights.
    """

    def __init__(self, args: EngineArgs, *, draft: bool = False) -> None:
        settings = args.speculation
        self.apart = settings is not None and settings.one_device  # it has weights
        self._within = settings is not None and settings.method == WITHIN
        self._draft = draft
        if draft and not self.apart:
            raise InvalidRequest("target: no draft model and no head drafts here", "target")

    def is_draft(self, name: str) -> bool:
        """Whether a tensor that comes is of what drafts."""
        return self._draft or name.startswith(PREFIX)

    def stored(self, name: str) -> str:
        """The name in a version of a tensor that comes."""
        bare = name.removeprefix(PREFIX)
        return PREFIX + bare if self.is_draft(name) and not self._within else bare

    def among(self, files: Iterable[Path]) -> bool:
        """Whether files hold tensors of a draft model or head behind the prefix.

        Raises:
            OSError, ValueError: one cannot be read.
        """
        return any(name.startswith(PREFIX) for file in files for name in read_header(file))
