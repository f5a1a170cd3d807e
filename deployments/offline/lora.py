"""The adapter of an offline request, in vLLM's form."""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfin.actors.adapters.files import read_folder
from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter of a request. Its content identifies it: the number is vLLM's, and unused."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False  # accepted for vLLM's sake: a changed folder is another adapter


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
