"""``AdaptersPart``: a model that computes with LoRA adapters."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from rayfin.actors.adapters.files import AdapterFiles, read_ref
from rayfin.actors.adapters.part import AdapterFacts, AdapterRef
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import AdapterUnavailable
from rayfin.actors.messages import BoolArray, Int32Array
from rayfin.actors.parts import Need
from rayfin.actors.runner.batch import ADAPTERS, RowInput
from rayfin.actors.runner.cpu.build_decoder import TOLERANCE
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.parts.lora.adapted_model import (
    AdaptedDecoder,
    AdaptedModel,
    DeviceTables,
    can_adapt,
)
from rayfin.actors.runner.parts.lora.reader import layer_sizes
from rayfin.actors.runner.parts.lora.store import AdapterStore
from rayfin.actors.runner.parts.model_part import Decoder, ModelPart
from rayfin.actors.settings.lora_limits import (
    adapter_budget,
    least_adapters,
    loras_in_memory,
    loras_in_step,
)
from rayfin.actors.timing import ADAPTER_FETCH_PAUSE_SECONDS, ADAPTER_FETCH_SECONDS


def make_adapters(args: EngineArgs, model: PreTrainedModel, rounded: bool) -> "AdaptersPart | None":
    """Returns the part of a model that serves adapters; None if it serves none."""
    return AdaptersPart(args) if args.serves_adapters else None


class AdaptersPart(ModelPart):
    """No adapters yet; ``over`` makes room for them."""

    hooks_layers = True
    follows_weights = True

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._tables: DeviceTables | None = None

    def over(self, decoder: Decoder) -> None:
        args, paged = self._args, decoder.paged
        dtype = paged.dtype if args.lora_dtype == "auto" else getattr(torch, args.lora_dtype)
        sizes = layer_sizes(paged.transformer)
        per_rank = sum(inputs + outputs for inputs, outputs in sizes.values()) * dtype.itemsize
        device = paged.device.type
        budget = adapter_budget(args, device, per_rank)
        self.store = AdapterStore(
            sizes,
            fetch,
            max_adapters=loras_in_memory(args, device),
            budget=budget,
            max_rank=args.max_lora_rank,
            dtype=dtype,
            device=paged.device,
            kernels=decoder.kernels if dtype in TOLERANCE else None,
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
        if model is not decoder.paged:  # a GPU's
            self._put_on_device(model)
        return AdaptedModel(decoder.paged, self.store, model)

    def _put_on_device(self, model: StepModel) -> None:
        """Makes decode steps of a recognised decoder take adapters in CUDA graphs."""
        from rayfin.actors.runner.gpu.decoder import GpuDecoder  # Triton is not everywhere

        if not isinstance(model, GpuDecoder) or not DeviceTables.fit(model, self.store):
            return
        entries = loras_in_step(self._args, "cuda")
        self._tables = DeviceTables(model, self.store, entries, self._args.max_lora_rank)
        model.low_rank = self._tables
        self.row_inputs = (RowInput(ADAPTERS, -1, self._tables.numbers),)

    def left_out(self, slots: Int32Array) -> BoolArray | None:
        if self._tables is None:
            return self.store.adapted(slots)
        return self._tables.left_out(slots)

    def alters(self, slots: Int32Array) -> BoolArray | None:
        return self.store.adapted(slots)

    def prepare(self, needs: Sequence[Need], *, at_once: bool = False) -> None:
        self.store.prepare(need.what for need in needs if isinstance(need.what, AdapterRef))


def fetch(ref: AdapterRef) -> AdapterFiles:
    """Returns the files of an adapter, from the actor that holds them.

    That actor may just have died: an ingress starts it again, and tells it what it held.

    Raises:
        AdapterUnavailable: no actor has given them within ADAPTER_FETCH_SECONDS.
    """
    if not ref.store:
        return read_ref(ref)
    import ray  # an engine in one process does without
    from ray.exceptions import RayError

    from rayfin.actors.processes.registry import NAMESPACE

    until = time.monotonic() + ADAPTER_FETCH_SECONDS
    while True:
        why = "its content is gone"
        try:
            store = ray.get_actor(ref.store, namespace=NAMESPACE)
            call: Any = store.fetch.remote(ref.digest)
            files: AdapterFiles | None = ray.get(call, timeout=until - time.monotonic())
            if files is not None:
                return files
        except (RayError, ValueError) as error:
            why = str(error)
        if time.monotonic() + ADAPTER_FETCH_PAUSE_SECONDS > until:
            raise AdapterUnavailable(f"The adapter {ref.name!r} cannot be fetched: {why}", "model")
        time.sleep(ADAPTER_FETCH_PAUSE_SECONDS)
