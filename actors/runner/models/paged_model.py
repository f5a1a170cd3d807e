"""A transformers decoder whose attention reads and writes pages.

Any ``AutoModelForCausalLM`` that dispatches its attention through transformers' attention registry
can be served. The function registered here as "rayfin" uses the ``PagedLayer`` that ``PagedModel``
has put on the calling attention module. There is no global state, so two models can share a
process.
"""

from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from rayfin.actors.errors import UnsupportedModel
from rayfin.actors.runner.step.batch import StepInputs
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.attention.write_kv import write_kv
from rayfin.kernels.shapes import PagedAttention

ATTENTION = "rayfin"
LAYER = "paged_layer"  # the attribute of an attention module that holds its AttentionLayer
PROBE_TOKENS = 2


class AttentionLayer(Protocol):
    """Computes attention for the module that it is put on."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, H, T, Dk]
        key: torch.Tensor,  # [1, Hkv, T, Dk]
        value: torch.Tensor,  # [1, Hkv, T, Dv]
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # [1, T, H, Dv]
        ...


def rayfin_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function in transformers' attention registry; calls the module's AttentionLayer."""
    if attention_mask is not None:  # the model's own: transformers makes none for this attention
        name = type(module).__name__
        raise UnsupportedModel(f"{name} cannot be served: it attends through its own mask", "model")
    layer: AttentionLayer = getattr(module, LAYER)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    out = layer.attend(
        module, query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return out, None


AttentionInterface.register(ATTENTION, rayfin_attention)


class StepModel(Protocol):
    """Computes a step: ``PagedModel``, or a faster replacement."""

    @property
    def layouts(self) -> list[KVLayout]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        ...


class CurrentStep:
    """The step that a model is computing, shared by all its layers."""

    inputs: StepInputs | None = None


class PagedLayer:
    """One layer's pages, and the attention kernel that reads them."""

    def __init__(
        self,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        kernel: PagedAttention,
        step: CurrentStep,
    ) -> None:
        self._k_pages = k_pages
        self._v_pages = v_pages
        self._kernel = kernel
        self._step = step

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes the step's keys and values to their slots, then attends over the pages."""
        assert self._step.inputs is not None, "a forward outside of a step"
        batch = self._step.inputs.batch
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, Hkv, D]
        write_kv(k, v, self._k_pages, self._v_pages, batch.slots)
        out = self._kernel(
            query[0].transpose(0, 1).contiguous(),
            self._k_pages,
            self._v_pages,
            batch,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        return out.unsqueeze(0)


class _Probe:
    """Replaces every layer for one forward, to learn what each one stores."""

    def __init__(self) -> None:
        self.seen: dict[torch.nn.Module, KVLayout] = {}
        self.windows: list[int | None] = []

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if module in self.seen or not getattr(module, "is_causal", True):
            raise UnsupportedModel(
                f"{type(module).__name__} is not plain causal attention", "model"
            )
        self.seen[module] = KVLayout(key.shape[1], key.shape[-1], value.shape[-1])
        self.windows.append(window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])


class PagedModel:
    """Runs a step's packed tokens through the model, with the cache of ``bind``.

    Args:
        layers: the layers of the model that this stage has, or None for all.

    Raises:
        UnsupportedModel: A layer keeps state that pages cannot hold.
    """

    def __init__(
        self, model: PreTrainedModel, kernel: PagedAttention, layers: range | None = None
    ) -> None:
        self._model = model
        total = model.config.get_text_config(decoder=True).num_hidden_layers
        self._layers = range(total) if layers is None else layers
        self._kernel = kernel
        self._step = CurrentStep()
        self._attention_modules: list[torch.nn.Module] = []
        self.layouts = self._probe()

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def transformer(self) -> PreTrainedModel:
        return self._model

    @property
    def attention_modules(self) -> list[torch.nn.Module]:
        """One per layer, in order."""
        return self._attention_modules

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``."""
        pages = zip(self._attention_modules, cache.keys, cache.values, strict=True)
        for module, k_pages, v_pages in pages:
            layer = PagedLayer(k_pages, v_pages, self._kernel, self._step)
            setattr(module, LAYER, layer)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        self._step.inputs = inputs
        try:
            output = self._model(
                input_ids=inputs.input_ids.unsqueeze(0),
                position_ids=inputs.batch.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=inputs.sampled,
            )
        finally:
            self._step.inputs = None
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def _probe(self) -> list[KVLayout]:
        tokens = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device=self.device)
        positions = torch.arange(PROBE_TOKENS, device=self.device).unsqueeze(0)
        probe, logits = self._run_probe(input_ids=tokens, position_ids=positions)
        _, default_logits = self._run_probe(input_ids=tokens)
        if not torch.allclose(logits, default_logits, rtol=1e-3, atol=1e-3, equal_nan=True):
            name = type(self._model).__name__
            raise UnsupportedModel(
                f"{name} cannot be served: it numbers positions in its own way", "model"
            )
        self._attention_modules = list(probe.seen)
        self._check_layers(probe)
        return list(probe.seen.values())

    def _run_probe(self, **inputs: torch.Tensor) -> tuple[_Probe, torch.Tensor]:
        """Runs a forward in which every attention returns zeros and the probe records it."""
        probe = _Probe()
        for module in self._model.modules():
            setattr(module, LAYER, probe)
        output = self._model(**inputs, use_cache=False)
        for module in self._model.modules():
            delattr(module, LAYER)
        return probe, output.logits

    def _check_layers(self, probe: _Probe) -> None:
        """Raises unless each layer attends once, through the registry, with its declared window."""
        config = self._model.config.get_text_config(decoder=True)
        name = type(self._model).__name__
        if len(probe.seen) != len(self._layers):
            raise UnsupportedModel(
                f"{name} cannot be served: {len(probe.seen)} of {len(self._layers)} layers "
                "attend through transformers' attention registry",
                "model",
            )
        layer_types = getattr(config, "layer_types", None) or []
        layer_types = layer_types[self._layers.start : self._layers.stop]
        for layer_type, window in zip(layer_types, probe.windows, strict=False):
            if (layer_type == "sliding_attention") != (window is not None):
                raise UnsupportedModel(
                    f"{name} cannot be served: a layer of type {layer_type} attends with "
                    f"window {window}",
                    "model",
                )
