"""Notes which files of Rayfin a process runs while a request is on its way.

Python imports this module at its start where the folder is on PYTHONPATH: in every process of a
server that tools/trace/request.py starts. A process notes nothing until the file ``on`` appears in
the folder RAYFIN_TRACE, and writes what it has noted when ``on`` goes.
"""

import inspect
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("actors", "cache", "deployments", "kernels"))
POLL_SECONDS = 0.05


class Notes:
    """Files and async generators whose code has run."""

    def __init__(self, folder: Path, package: str) -> None:
        self.on = False
        self.files: set[str] = set()
        self.generators: set[str] = set()
        self._folder = folder
        self._package = package

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        """Called by Python at every call of a function."""
        if not self.on or event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(self._package):
            name = code.co_filename[len(self._package) + 1 :]
            self.files.add(name)
            if code.co_flags & inspect.CO_ASYNC_GENERATOR:
                self.generators.add(f"{name}:{code.co_name}")

    def watch(self) -> None:
        """Follows the file ``on`` until the process ends."""
        while True:
            time.sleep(POLL_SECONDS)
            wanted = (self._folder / "on").exists()
            if self.on and not wanted and self.files:
                kind = " ".join(
                    Path(f"/proc/{os.getpid()}/cmdline").read_bytes().decode().split("\0")
                )
                noted = {
                    "process": kind,
                    "files": sorted(self.files),
                    "generators": sorted(self.generators),
                }
                (self._folder / f"{os.getpid()}.json").write_text(json.dumps(noted))
            self.on = wanted


if "RAYFIN_TRACE" in os.environ:
    notes = Notes(Path(os.environ["RAYFIN_TRACE"]), os.environ["RAYFIN_TRACE_PACKAGE"])
    threading.Thread(target=notes.watch, daemon=True).start()
    threading.setprofile(notes.profile)
    sys.setprofile(notes.profile)
