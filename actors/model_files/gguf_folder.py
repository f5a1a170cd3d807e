"""GGUF files of llama.cpp, turned once into a folder that is served as any other.

transformers reads configuration, tokenizer and weights of such a file; its package is the extra
``gguf``. Weights become bfloat16 numbers (float32, if the file has those), whatever the file's
format. The folder lies in a cache and is found by the file's path, size and time.
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from rayfin.actors.errors import InvalidConfig

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
CACHE = "RAYFIN_GGUF_CACHE"
"""The environment variable with the folder of these folders; default ~/.cache/rayfin/gguf."""

VERSION = 1
"""Of the folders' content: a change of this module that changes them counts it up."""


ON_HUB = re.compile(r"([\w.-]+/[\w.-]+):(\w+)")
"""OWNER/MODEL:FORMAT, as vLLM has it."""


def is_gguf(name: str) -> bool:
    """Whether a model's name is that of a GGUF file."""
    if not name.lower().endswith(SUFFIX) and ON_HUB.fullmatch(name) is None:
        return False
    return not Path(name).is_dir()


def gguf_folder(name: str) -> Path:
    """The folder of a GGUF file: a path, or on the Hub OWNER/MODEL/FILE.gguf or OWNER/MODEL:Q4_K_M.

    The first call for a file makes it, in a process of its own, while others wait.

    Raises:
        InvalidConfig: there is no such file, a package is missing, or the file cannot be read.
    """
    path = _find(name)
    about = path.stat()
    mark = f"{VERSION} {path.resolve()} {about.st_size} {about.st_mtime_ns}"
    kept = Path(os.environ.get(CACHE) or Path.home() / ".cache" / "rayfin" / "gguf")
    folder = kept / f"{path.stem}-{hashlib.sha256(mark.encode()).hexdigest()[:16]}"
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
            _make(path, folder)
    return folder


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    parts, of_format = name.split("/"), ON_HUB.fullmatch(name)
    local = path.is_absolute() or name.startswith((".", "~"))
    if of_format is None and (local or len(parts) < 3):
        raise InvalidConfig(f"there is no file {name}", "model")
    return _fetch(name)


@cache
def _fetch(name: str) -> Path:
    """The file of a name on the Hub, which is asked once in a process."""
    import huggingface_hub

    parts, of_format = name.split("/"), ON_HUB.fullmatch(name)
    try:
        if of_format is not None:
            repository, kind = of_format.groups()
            file = _of_format(huggingface_hub.list_repo_files(repository), repository, kind)
        else:
            repository, file = "/".join(parts[:2]), "/".join(parts[2:])
        return Path(huggingface_hub.hf_hub_download(repository, file))
    except InvalidConfig:
        raise
    except Exception as error:  # the package raises those of several HTTP libraries
        why = str(error).partition("\n")[0]
        raise InvalidConfig(f"{name} cannot be fetched: {why}", "model") from error


def _of_format(files: list[str], repository: str, kind: str) -> str:
    """The file of a format such as Q4_K_M among those of a repository."""
    found = [file for file in files if file.lower().endswith(SUFFIX)]
    for file in found:
        if file.lower().endswith((f"-{kind}{SUFFIX}".lower(), f".{kind}{SUFFIX}".lower())):
            return file
    names = ", ".join(found) or "none"
    raise InvalidConfig(f"{repository} has no GGUF file of {kind}; it has {names}", "model")


def _make(path: Path, folder: Path) -> None:
    logger.info("turning %s into a folder in %s, once", path.name, folder.parent)
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        # A process of its own: this one stays without torch, and the memory is given back.
        code = f"from {__name__} import convert; convert({str(path)!r}, {str(made)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise InvalidConfig(f"{path.name} cannot be read: {lines[-1]}", "model")
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def convert(file: str, folder: str) -> None:
    """Writes the model in ``file`` to ``folder``: configuration, tokenizer, weights."""
    import torch
    from gguf import GGMLQuantizationType, GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(file)
    # Vectors are float32 in any file.
    kinds = {tensor.tensor_type for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1}
    dtype = torch.float32 if kinds == {GGMLQuantizationType.F32} else torch.bfloat16
    where: Any = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    except Exception as error:  # of any kind of tokenizer; --tokenizer may name another one
        print(f"the tokenizer in {path.name} cannot be read: {error}", flush=True)
    model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
    model.is_quantized, model.hf_quantizer = False, None  # as its weights no longer are
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
