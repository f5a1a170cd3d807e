"""GGUF files of llama.cpp, turned once into a folder that is served as any other.

The folder has configuration, tokenizer, and weights in the file's own blocks where these are read
(runner/quantized/gguf_file.py); the package for such files is the extra ``gguf``. It lies in a
cache and is found by the file's path, size, times and inode.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from rayfin.actors.errors import InvalidConfig

SUFFIX = ".gguf"
CACHE = "RAYFIN_GGUF_CACHE"
"""The environment variable with the folder of these folders; default ~/.cache/rayfin/gguf."""

PLAIN = "rayfin.actors.model_files.gguf_decoder"
CONVERTER = "rayfin.actors.runner.quantized.gguf_file"

VERSION = 4
"""Of the folders' content: a change of this module that changes them counts it up."""

ON_HUB = re.compile(r"([\w.-]+/[\w.-]+):(\w+)")
"""OWNER/MODEL:FORMAT, as vLLM has it."""

PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf", re.IGNORECASE)
"""A file of several, as gguf-split names them."""


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file."""
    if not name.lower().endswith(SUFFIX) and ON_HUB.fullmatch(name) is None:
        return False
    return not Path(name).is_dir()


def gguf_folder(name: str, *, revision: str | None = None, cache_dir: str | None = None) -> Path:
    """The folder of a GGUF file: a path, or on the Hub OWNER/MODEL/FILE.gguf or OWNER/MODEL:Q4_K_M.

    The first call for a file makes it, in a process of its own, while others wait. Of a file in
    parts (FILE-00001-of-00003.gguf) any one stands for all.

    Args:
        revision, cache_dir: where on the Hub, or in its cache, to look (``EngineArgs.hub``).

    Raises:
        InvalidConfig: there is no such file, a package is missing, or the file cannot be read.
    """
    files = _find(name, revision, cache_dir)
    path = files[0]
    about = [(str(one.resolve()), _state(one)) for one in files]
    kept = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "rayfin" / "gguf")
    digest = hashlib.sha256(repr((VERSION, about)).encode()).hexdigest()
    folder = kept / f"{path.stem}-{digest[:16]}"
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise InvalidConfig(
            f"{path.name} is a GGUF file, and the package that reads it is not installed: "
            "pip install 'rayfin[gguf]'",
            "model",
        )
    kept.mkdir(parents=True, exist_ok=True)
    with (kept / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _remove_leftovers(folder)
            _make(files, folder)
    return folder


def _state(file: Path) -> tuple[int, ...]:
    """What changes with a file's content, also where its time is set back afterwards."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def _find(name: str, revision: str | None, cache_dir: str | None) -> tuple[Path, ...]:
    """The file, or its parts in order."""
    path = Path(name).expanduser()
    if path.is_file():
        return tuple(path.with_name(part) for part in _parts(path.name, os.listdir(path.parent)))
    parts, of_format = name.split("/"), ON_HUB.fullmatch(name)
    local = path.is_absolute() or name.startswith((".", "~"))
    if of_format is None and (local or len(parts) < 3):
        raise InvalidConfig(f"there is no file {name}", "model")
    return _fetch(name, revision, cache_dir)


def _parts(file: str, present: Iterable[str]) -> list[str]:
    """The names of all parts of a file, one of which ``file`` is; those ``present`` are known.

    Raises:
        InvalidConfig: one is missing.
    """
    if (match := PART.fullmatch(file)) is None:
        return [file]
    start, count, there = match[1], int(match[2]), set(present)
    suffix = file[-len(SUFFIX) :]  # .GGUF too
    names = [f"{start}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]
    for name in names:
        if name not in there:
            raise InvalidConfig(f"there is no file {name}, a part of the model of {file}", "model")
    return names


@cache
def _fetch(name: str, revision: str | None, cache_dir: str | None) -> tuple[Path, ...]:
    """The files of a name on the Hub, which is asked once in a process."""
    import huggingface_hub

    parts, of_format = name.split("/"), ON_HUB.fullmatch(name)
    repository = of_format[1] if of_format else "/".join(parts[:2])
    file = "" if of_format else "/".join(parts[2:])
    try:
        names = [file]
        if of_format or PART.fullmatch(file):
            files = huggingface_hub.list_repo_files(repository, revision=revision)
            names = _parts(_of_format(files, *of_format.groups()) if of_format else file, files)
        return tuple(
            Path(
                huggingface_hub.hf_hub_download(
                    repository, one, revision=revision, cache_dir=cache_dir
                )
            )
            for one in names
        )
    except InvalidConfig:
        raise
    except Exception as error:  # the package raises those of several HTTP libraries
        why = str(error).partition("\n")[0]
        raise InvalidConfig(f"{name} cannot be fetched: {why}", "model") from error


def _of_format(files: list[str], repository: str, kind: str) -> str:
    """The file of a format such as Q4_K_M among those of a repository, or its first part."""
    gguf_files = [file for file in files if file.lower().endswith(SUFFIX)]
    ends = (f"-{kind}".lower(), f".{kind}".lower())
    for file in sorted(gguf_files):
        part = PART.fullmatch(file)
        stem = part[1] if part else file.removesuffix(file[-len(SUFFIX) :])
        if stem.lower().endswith(ends):
            return file
    names = ", ".join(gguf_files) or "none"
    raise InvalidConfig(f"{repository} has no GGUF file of {kind}; it has {names}", "model")


def _remove_leftovers(folder: Path) -> None:
    """Removes what killed conversions left of a folder, whose lock is held."""
    for left in folder.parent.iterdir():
        if left.name.startswith(f"{folder.name}.") and left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def _make(files: Sequence[Path], folder: Path) -> None:
    path = files[0]
    size = sum(file.stat().st_size for file in files) / 1e6
    _tell(f"Turning {path.name} ({size:,.0f} MB) into a folder in {folder.parent}, once ...")
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        # A process of its own: this one stays without torch, and the memory is given back.
        what = f"({list(map(str, files))!r}, {str(temporary)!r})"
        code = (
            f"from {PLAIN} import convert_plain\n"
            f"if not convert_plain{what}:\n"
            f"    from {CONVERTER} import convert\n"
            f"    convert{what}"
        )
        command = [sys.executable, "-c", code]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                _tell(line.rstrip())
            if process.wait():
                errors.seek(0)
                lines = errors.read().strip().splitlines() or [f"exit status {process.returncode}"]
                raise InvalidConfig(f"{path.name} cannot be read: {lines[-1]}", "model")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tell(line: str) -> None:
    """Shows a line at once; no logger is set up yet."""
    print(line, file=sys.stderr, flush=True)
