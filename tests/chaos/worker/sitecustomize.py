"""Read by every Python of a chaos run's cluster, whose PYTHONPATH begins with this folder.

With CHAOS_RUNNER=hash, the model runner of a worker is hash_runner.py's: the product has no door
for a fake model, so it is put under it from outside, where all that is Ray stays as it is.
"""

import importlib.abc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

REPLACED = "rayfin.actors.runner.model_runner"


class HashRunnerFinder(importlib.abc.MetaPathFinder):
    """Finds hash_runner.py under the model runner's name."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != REPLACED:
            return None
        return importlib.util.spec_from_file_location(
            name, Path(__file__).with_name("hash_runner.py")
        )


if os.environ.get("CHAOS_RUNNER") == "hash":
    sys.meta_path.insert(0, HashRunnerFinder())
