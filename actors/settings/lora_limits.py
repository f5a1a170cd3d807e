"""How many LoRA adapters an engine has at once."""

from typing import Protocol

from rayfin.actors.errors import InvalidConfig

DEFAULT_MAX_LORAS = {"cpu": 32, "cuda": 8}
CPU_LORAS_PER_LORA = 4
USUAL_RANK = 16


class LoraLimits(Protocol):
    """The part of ``EngineArgs`` that is about it."""

    @property
    def serves_adapters(self) -> bool: ...

    @property
    def max_loras(self) -> int | None: ...

    @property
    def max_cpu_loras(self) -> int | None: ...

    @property
    def max_lora_rank(self) -> int: ...

    @property
    def tensor_parallel_size(self) -> int: ...

    @property
    def pipeline_parallel_size(self) -> int: ...


def require_one_device(args: LoraLimits) -> None:
    """Refuses adapters where several devices share the model.

    Raises:
        InvalidConfig: they do.
    """
    if args.serves_adapters and args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        raise InvalidConfig("enable_lora is for one device, not for several", "enable_lora")


def loras_in_step(args: LoraLimits, device: str) -> int:
    """The adapters that one step may have on ``device``; 0 without adapters."""
    return (args.max_loras or DEFAULT_MAX_LORAS[device]) if args.serves_adapters else 0


def loras_in_memory(args: LoraLimits, device: str) -> int:
    """The adapters that a runner keeps, at least those of a step."""
    in_step = loras_in_step(args, device)
    return max(args.max_cpu_loras or CPU_LORAS_PER_LORA * in_step, in_step)


def adapter_budget(args: LoraLimits, device: str, bytes_per_rank: int) -> int:
    """Bytes that are kept for adapters, beside the KV cache: those of a step, of the largest rank.

    Args:
        bytes_per_rank: of an adapter of rank 1 for all layers.
    """
    return loras_in_step(args, device) * args.max_lora_rank * bytes_per_rank


def least_adapters(args: LoraLimits, budget: int, device: str) -> tuple[str, int]:
    """The settings with the smallest budget that is of use, and how many bytes less it is."""
    rank = min(args.max_lora_rank, USUAL_RANK)
    least = budget // (loras_in_step(args, device) * args.max_lora_rank) * rank
    return f"max_loras 1 with max_lora_rank {rank}", budget - least
