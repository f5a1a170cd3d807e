"""Spares the processes of a server an import that Ray Serve makes for nothing.

Where pandas is installed Serve imports it, 0.7 s in each of five processes, to encode the data
frames that a deployment may return. None of Rayfin's does, and where pandas is not installed Serve
does without.

To import this module is enough. Ray's workers do so before they take work (``environment.py``).
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

SPARED = "pandas"
IMPORTER = "ray.serve._private.utils"
ENCODERS = "serve_encoders"
"""What the importer defines after its imports, of what these have brought."""


class PandasSpared(MetaPathFinder):
    """Says that pandas is not installed while Serve's module is being imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Leaves every other import to other finders.

        Raises:
            ModuleNotFoundError: it is Serve's.
        """
        importer = sys.modules.get(IMPORTER) if fullname == SPARED else None
        if importer is not None and not hasattr(importer, ENCODERS):
            raise ModuleNotFoundError(f"Ray Serve is spared {SPARED}", name=SPARED)


if not any(isinstance(finder, PandasSpared) for finder in sys.meta_path):
    sys.meta_path.insert(0, PandasSpared())
