"""The adapter of an offline request, in vLLM's form."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayfin.actors.adapters.files import CONFIG, WEIGHTS, AdapterFiles, read_folder
from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter of a request. Its content identifies it: the number is vLLM's, and unused."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False  # accepted for vLLM's sake: a changed folder is another adapter


def write_adapter(
    folder: Path, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], config: Any
) -> AdapterFiles:
    """Writes a trainer's tensors as a folder of peft's, and returns what it holds.

    Args:
        tensors: A and B by name, as peft names them; others are left out.
        config: peft's, or what its adapter_config.json holds.

    Raises:
        InvalidRequest: there are none.
    """
    from safetensors.torch import save  # imports torch

    from rayfin.actors.weights.tensors import plain_name

    said = config if isinstance(config, Mapping) else config.to_dict()
    named = tensors.items() if isinstance(tensors, Mapping) else tensors
    content = {
        plain_name(name): tensor.detach().to("cpu", copy=True).contiguous()
        for name, tensor in named
        if ".lora_" in name
    }
    if not content:
        raise InvalidRequest("tensors: no name has .lora_A or .lora_B in it", "tensors")
    (folder / CONFIG).write_text(json.dumps(said, default=_plain))
    (folder / WEIGHTS).write_bytes(save(content))
    return read_folder(str(folder))


def _plain(value: Any) -> Any:
    """What of peft's configurations JSON has no form for: sets, enumerations."""
    return sorted(value) if isinstance(value, set) else str(getattr(value, "value", value))


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


def loras_of(requests: LoRARequests, count: int) -> list[LoRARequest | None]:
    """The adapter of each of ``count`` prompts.

    Raises:
        InvalidRequest: the numbers differ.
    """
    if requests is None or isinstance(requests, LoRARequest):
        return [requests] * count
    if len(requests) != count:
        raise InvalidRequest(f"{count} prompts and {len(requests)} lora_request", "lora_request")
    return list(requests)


def parts_of(requests: Sequence[LoRARequest | None]) -> list[tuple[AdapterRef, ...]]:
    """Returns the parts of the engine's requests that they ask for; each folder is read once.

    Raises:
        InvalidRequest: a folder holds no adapter.
    """
    refs: dict[LoRARequest, AdapterRef] = {}
    for request in requests:
        if request is not None and request not in refs:
            files = read_folder(request.lora_path)
            refs[request] = AdapterRef(files.digest, request.lora_name, files.folder)
    return [() if request is None else (refs[request],) for request in requests]
