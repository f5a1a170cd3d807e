"""Spares the processes of a server an import that Ray Serve makes for nothing.

Where pandas is installed Serve imports it, 0.7 s in each of five processes, to encode the data
frames that a deployment may return. None of Rayfin's does, and where pandas is not installed Serve
does without.

To import this module is enough. Ray's workers do so before they take work (``environment.py``).
Where Serve's module has another name, Serve imports pandas as it would.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import FrameType, ModuleType

SPARED = "pandas"
IMPORTER = "ray.serve._private.utils"


class PandasSpared(MetaPathFinder):
    """Says that pandas is not installed where Serve's module imports it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Leaves every other import to other finders.

        Raises:
            ModuleNotFoundError: it is Serve's.
        """
        if fullname == SPARED and _imports(IMPORTER):
            raise ModuleNotFoundError(f"Ray Serve is spared {SPARED}", name=SPARED)


def _imports(module: str) -> bool:
    """Whether the import under way in this thread stands in the body of that module."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name != "<module>":
        return False
    return bool(frame.f_globals.get("__name__") == module)


if not any(isinstance(finder, PandasSpared) for finder in sys.meta_path):
    sys.meta_path.insert(0, PandasSpared())
