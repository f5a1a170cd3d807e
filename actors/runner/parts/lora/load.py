"""``AdaptersPart``: a model that computes with LoRA adapters."""

from collections.abc import Sequence

import torch

from rayfin.actors.adapters.part import AdapterFacts, AdapterRef
from rayfin.actors.config import EngineArgs
from rayfin.actors.parts import Need
from rayfin.actors.runner.cpu.build_decoder import TOLERANCE
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.parts.lora.adapted_decoder import AdaptedDecoder, can_adapt
from rayfin.actors.runner.parts.lora.adapted_model import AdaptedModel
from rayfin.actors.runner.parts.lora.reader import layer_sizes
from rayfin.actors.runner.parts.lora.store import AdapterStore, Fetch
from rayfin.actors.runner.parts.model_part import Decoder, ModelPart
from rayfin.actors.settings.lora_limits import (
    adapter_budget,
    least_adapters,
    loras_in_memory,
    loras_in_step,
)
from rayfin.kernels.cpu.kernels import CpuKernels


class AdaptersPart(ModelPart):
    """No adapters yet; the layers of ``paged`` have their sizes still.

    Args:
        fetch: gets an adapter's files.
    """

    hooks_layers = True

    def __init__(
        self, args: EngineArgs, paged: PagedModel, fetch: Fetch, kernels: CpuKernels | None
    ) -> None:
        dtype = paged.dtype if args.lora_dtype == "auto" else getattr(torch, args.lora_dtype)
        sizes = layer_sizes(paged.transformer)
        per_rank = sum(inputs + outputs for inputs, outputs in sizes.values()) * dtype.itemsize
        device = paged.device.type
        budget = adapter_budget(args, device, per_rank)
        self.store = AdapterStore(
            sizes,
            fetch,
            most=loras_in_memory(args, device),
            budget=budget,
            max_rank=args.max_lora_rank,
            dtype=dtype,
            device=paged.device,
            kernels=kernels if dtype in TOLERANCE else None,
        )
        self.observers = (self.store,)
        self.facts = AdapterFacts(
            num_bytes=budget,
            at_once=loras_in_step(args, device),
            smaller=least_adapters(args, budget, device),
        )

    def takes(self, decoder: CpuDecoder | None) -> bool:
        return self.store.packs and (decoder is None or can_adapt(decoder, self.store))

    def wrap(self, model: StepModel, decoder: Decoder) -> StepModel:
        if isinstance(model, CpuDecoder):
            return AdaptedDecoder(model, self.store)
        return AdaptedModel(decoder.paged, self.store)

    def prepare(self, needs: Sequence[Need], *, at_once: bool = False) -> None:
        self.store.prepare(need.what for need in needs if isinstance(need.what, AdapterRef))
