"""A transformers decoder whose attention reads and writes pages.

Any ``AutoModelForCausalLM`` that dispatches its attention through transformers' attention registry
can be served. The function registered here as "rayfin" uses the ``PagedLayer`` that ``PagedModel``
has put on the calling attention module. There is no global state, so two models can share a
process.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.runner.batch import SHIFTS, STATES, GivenInputs, StepInputs
from rayfin.actors.runner.models.indexer import (
    NO_MASK,
    Forward,
    PagedIndex,
    index_keys,
    index_layout,
    redirect_indexers,
)
from rayfin.actors.runner.models.model_attention import redirect_attention, with_positions
from rayfin.actors.runner.models.recurrent import RecurrentLayers, find_stateful
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.attention.chosen import attend_chosen
from rayfin.kernels.attention.write_kv import WriteKV, write_kv
from rayfin.kernels.shapes import PagedAttention, PagedBatch, within_chunks

ATTENTION = "rayfin"
LAYER = "paged_layer"  # the attribute of an attention module that holds its AttentionLayer
PROBE_TOKENS = 2
WINDOW, CHUNK = "sliding_window", "attention_chunk_size"
ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""Types of layers that keep only keys and values."""


class AttentionLayer(Protocol):
    """Computes attention for the module that it is put on."""

    def positions(self, query: torch.Tensor) -> torch.Tensor:
        """The positions [T] of the tokens of ``query``."""
        ...

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
        chosen: torch.Tensor | None,  # [1, T, C], what an indexer gave
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
    slopes: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function in transformers' attention registry; calls the module's AttentionLayer."""
    if (
        attention_mask is not None and attention_mask is not NO_MASK
    ):  # the model's own: transformers makes none for this attention
        name = type(module).__name__
        raise UnsupportedModel(f"{name} cannot be served: it attends through its own mask", "model")
    # Rotary tables are fp32, and some families leave query and key so.
    query, key = query.to(value.dtype), key.to(value.dtype)
    layer: AttentionLayer = getattr(module, LAYER)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if slopes is not None:  # ALiBi, [H]
        query, key = with_positions(query, key, layer.positions(query), slopes, scale)
    out = layer.attend(
        module,
        query,
        key,
        value,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        chosen=indices,
    )
    return out, None


AttentionInterface.register(ATTENTION, rayfin_attention)


def set_attention(model: PreTrainedModel, name: str) -> None:
    """Makes all modules of ``model`` ask the registry for the attention ``name`` from now on."""
    # Not by set_attn_implementation: it believes flags of the model's class, and some are wrong.
    configs: Iterator[Any] = (vars(module).get("config") for module in model.modules())
    for config in {id(config): config for config in configs if config is not None}.values():
        config._attn_implementation_internal = name


class CurrentStep:
    """The step that a model is computing, shared by all its layers."""

    inputs: StepInputs | None = None


@dataclass(frozen=True, slots=True)
class MaskLimit:
    """A field of a config that limits what a layer sees by transformers' mask alone."""

    config: Any
    name: str  # "sliding_window" or "attention_chunk_size"

    @property
    def tokens(self) -> int:
        value: int = getattr(self.config, self.name)
        return value


class PagedLayer:
    """One layer's pages, and the attention kernel that reads them."""

    def __init__(
        self,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        kernel: PagedAttention,
        step: CurrentStep,
        limit: MaskLimit | None = None,
        group: int = 0,
    ) -> None:
        self._limit = limit
        self._group = group  # of layers, whose page tables it reads
        self._k_pages = k_pages
        self._v_pages = v_pages
        self._kernel = kernel
        self._write: WriteKV = getattr(kernel, "write_kv", write_kv)
        self._step = step

    def positions(self, query: torch.Tensor) -> torch.Tensor:
        """The positions [T] of the step's tokens."""
        assert self._step.inputs is not None, "a forward outside of a step"
        return self._step.inputs.batch.positions

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
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes the step's keys and values to their slots, then attends over the pages."""
        assert self._step.inputs is not None, "a forward outside of a step"
        batch = self._step.inputs.batch.of_group(self._group)
        k, v = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [T, Hkv, D]
        self._write(k, v, self._k_pages, self._v_pages, batch.slots)
        if self._limit is not None and self._limit.name == CHUNK:
            batch = within_chunks(batch, self._limit.tokens)
        elif self._limit is not None:
            window = self._limit.tokens
        rows = query[0].transpose(0, 1).contiguous()
        out = self._kernel(
            rows,
            self._k_pages,
            self._v_pages,
            batch,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )
        if chosen is not None and chosen.shape[-1]:
            # A token that sees all keys has the kernel's bits, whatever is beside it.
            tokens = (batch.positions >= chosen.shape[-1]).nonzero()[:, 0]
            arguments = (rows[tokens], self._k_pages, self._v_pages, batch, chosen[0, tokens])
            out[tokens] = attend_chosen(*arguments, tokens=tokens, scale=scale, sinks=sinks)
        return out.unsqueeze(0)


class _Probe:
    """Replaces every layer for one forward, to learn what each call of attention stores."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.nn.Module, KVLayout]] = []
        self.windows: list[int | None] = []
        self.indexers: set[torch.nn.Module] = set()

    def positions(self, query: torch.Tensor) -> torch.Tensor:
        """Positions from 0 on."""
        return torch.arange(query.shape[2], device=query.device)

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
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        if not getattr(module, "is_causal", True):
            raise UnsupportedModel(
                f"{type(module).__name__} cannot be served: its attention is not causal", "model"
            )
        layout = KVLayout(key.shape[1], key.shape[-1], value.shape[-1])
        self.calls.append((module, layout))
        self.windows.append(window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def choose(
        self,
        indexer: torch.nn.Module,
        forward: Forward,
        hidden: torch.Tensor,
        query: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Records an indexer's keys; all tokens see all."""
        self.indexers.add(indexer)
        self.windows.append(None)
        self.calls.append((indexer, index_layout(index_keys(forward, hidden, query, rotary))))
        return torch.empty(1, hidden.shape[1], 0, dtype=torch.int32, device=hidden.device)


class _SharedLayer:
    """The layers of a module that attends several times in a forward: one for each call."""

    def __init__(self, layers: list[PagedLayer]) -> None:
        self._layers = layers
        self._next = 0

    def restart(self) -> None:
        """A forward begins."""
        self._next = 0

    def positions(self, query: torch.Tensor) -> torch.Tensor:
        """The positions [T] of the step's tokens."""
        return self._layers[0].positions(query)

    def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The attention of the layer whose turn it is."""
        layer = self._layers[self._next]
        self._next += 1
        return layer.attend(*args, **kwargs)


class PagedModel:
    """Runs a step's packed tokens through the model, with the cache of ``bind``.

    Args:
        layers: the layers of the model that this stage has, or None for all.

    Raises:
        UnsupportedModel: A layer keeps state that neither pages nor slots can hold.
    """

    def __init__(
        self, model: PreTrainedModel, kernel: PagedAttention, layers: range | None = None
    ) -> None:
        self._model = model
        total = model.config.get_text_config(decoder=True).num_hidden_layers
        self._layers = range(total) if layers is None else layers
        self._kernel = kernel
        self._step = CurrentStep()
        self._calls: list[torch.nn.Module] = []  # what keeps keys, in the order of calls
        self._indexers: set[torch.nn.Module] = set()  # those of them that choose keys
        self._shared: list[_SharedLayer] = []
        self._limits: dict[int, MaskLimit] = {}  # by call
        accepted = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._picks_logits = "logits_to_keep" in accepted
        self._has_windows = False
        self._columns = 0  # of logits, at least
        self._output: Any = None  # the type of what its layers give
        self.recurrent: RecurrentLayers | None = None
        redirect_attention(model, ATTENTION, rayfin_attention)
        redirect_indexers(model, ATTENTION, LAYER)
        set_attention(model, ATTENTION)
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
        """Each once, in order: one per layer, unless layers share them."""
        return [one for one in dict.fromkeys(self._calls) if one not in self._indexers]

    @property
    def is_limited_by_mask(self) -> bool:
        """Whether a layer sees less than what its call of attention says."""
        return bool(self._limits)

    def pad_logits(self, vocabulary: int) -> None:
        """From now on logits have a column for each token: those without a row of the head -inf.

        Apertus 1.5 has no rows for tokens of images, which it reads and never writes.
        """
        self._columns = vocabulary

    def limit_by_mask(self) -> bool:
        """Takes the config's window for all layers; False if none has one, or calls have theirs."""
        config = self._model.config.get_text_config(decoder=True)
        if not getattr(config, WINDOW, None) or self._limits or self._has_windows:
            return False
        self._limits = {index: MaskLimit(config, WINDOW) for index in range(len(self._calls))}
        self.layouts = self._with_windows(self.layouts)
        return True

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers keep their keys and values in ``cache``.

        Raises:
            InvalidConfig: Pages do not divide the chunks that a layer attends in.
        """
        layers: dict[torch.nn.Module, list[PagedLayer]] = {}
        pages = zip(self._calls, cache.keys, cache.values, strict=True)
        for index, (module, k_pages, v_pages) in enumerate(pages):
            limit = self._limits.get(index)
            if limit is not None and limit.name == CHUNK and limit.tokens % cache.page_size:
                raise InvalidConfig(
                    f"page_size ({cache.page_size}) must divide the model's {CHUNK} "
                    f"({limit.tokens})",
                    "page_size",
                )
            if module in self._indexers:
                setattr(module, LAYER, PagedIndex(k_pages, v_pages, self._step))
                continue
            group = cache.group[index]
            layer = PagedLayer(k_pages, v_pages, self._kernel, self._step, limit, group)
            layers.setdefault(module, []).append(layer)
        self._shared = []
        for module, parts in layers.items():
            if len(parts) > 1:
                self._shared.append(_SharedLayer(parts))
            setattr(module, LAYER, parts[0] if len(parts) == 1 else self._shared[-1])

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        self._step.inputs = inputs
        for layer in self._shared:
            layer.restart()
        positions = inputs.batch.positions
        options: dict[str, Any] = {}
        if inputs.rope_positions is not None:
            positions = inputs.rope_positions
        if inputs.given is not None:
            states = self._model.get_input_embeddings()(inputs.input_ids)
            states[inputs.given.index] = inputs.given.states.to(states)
            options["inputs_embeds"] = states.unsqueeze(0)
            options |= added_states(inputs.given, len(states))
        complete = False
        if self.recurrent is not None:
            self.recurrent.begin(inputs)
        try:
            output = self._run(inputs.input_ids, positions, inputs.sampled, **options)
            complete = True
        finally:
            self._step.inputs = None
            if self.recurrent is not None:
                self.recurrent.end(complete=complete)
        missing = self._columns - output.shape[-1]
        return pad(output, (0, missing), value=-torch.inf) if missing > 0 else output

    @property
    def why_unrecorded(self) -> str | None:
        """Why no CUDA graph can hold a step: the host has a part in it. None if one may."""
        if self._indexers:
            return "its layers choose keys"
        if any(limit.name == CHUNK for limit in self._limits.values()):
            return "its layers attend in chunks"
        return None

    def run_layers(self, tokens: torch.Tensor, batch: PagedBatch) -> torch.Tensor:
        """The hidden states [T, hidden] of ``tokens`` [T] that ``run_head`` takes."""
        self._step.inputs = StepInputs(tokens, batch, tokens)
        for layer in self._shared:
            layer.restart()
        positions = batch.positions
        if SHIFTS in batch.scratch:
            positions = positions + batch.scratch[SHIFTS]
        options = {"position_ids": positions.unsqueeze(0)} if self._takes_positions else {}
        if self.recurrent is not None:
            self.recurrent.begin_recorded(*batch.scratch[STATES])
        try:
            output = self._base(input_ids=tokens.unsqueeze(0), use_cache=False, **options)
        finally:
            self._step.inputs = None
            if self.recurrent is not None:
                self.recurrent.end(complete=False)
        self._output = type(output)
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    def run_head(self, states: torch.Tensor) -> torch.Tensor:
        """The logits [S, V] of hidden states [S, hidden]: what the model does behind its layers."""
        base = self._base
        before = vars(base).pop("forward", None)
        output = self._output(last_hidden_state=states.unsqueeze(0))
        vars(base)["forward"] = lambda *_, **__: output
        try:
            logits = self._run(states.new_zeros(len(states), dtype=torch.int64), None, None)
        finally:
            del vars(base)["forward"]
            if before is not None:
                vars(base)["forward"] = before
        missing = self._columns - logits.shape[-1]
        return pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits

    @property
    def _base(self) -> Any:
        """The model without its head."""
        model: Any = self._model
        if not isinstance(model, PreTrainedModel):
            return model.model
        decoder = model.get_decoder()  # type: ignore[no-untyped-call]
        return decoder if isinstance(decoder, PreTrainedModel) else model.base_model

    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        sampled: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """The logits [S, V] of transformers' forward over ``tokens`` [T].

        Args:
            positions: [T], or [3, T] for rotary embeddings of images.
        """
        if positions is not None and self._takes_positions:
            options["position_ids"] = positions.unsqueeze(-2)
        if sampled is not None and self._picks_logits:
            options["logits_to_keep"] = sampled
        if "inputs_embeds" not in options:
            options["input_ids"] = tokens.unsqueeze(0)
        output = self._model(**{"use_cache": False, **options})
        logits: torch.Tensor = output.logits[0]
        return logits if sampled is None or self._picks_logits else logits[sampled]

    @torch.inference_mode()
    def _probe(self) -> list[KVLayout]:
        tokens = torch.zeros(PROBE_TOKENS, dtype=torch.int64, device=self.device)
        positions = torch.arange(PROBE_TOKENS, device=self.device)
        probe, logits = self._run_probe(tokens, positions)
        _, default_logits = self._run_probe(tokens, None)
        if not torch.allclose(logits, default_logits, rtol=1e-3, atol=1e-3, equal_nan=True):
            name = type(self._model).__name__
            raise UnsupportedModel(
                f"{name} cannot be served: it numbers positions in its own way", "model"
            )
        self._calls = [module for module, _ in probe.calls]
        self._indexers = probe.indexers
        if _may_keep_states(self._model):
            self._find_states(tokens)
        self._check_layers(probe)
        seen = zip(probe.calls, probe.windows, strict=True)
        return self._with_windows([replace(kv, window=window) for (_, kv), window in seen])

    def _with_windows(self, layouts: list[KVLayout]) -> list[KVLayout]:
        """The same, with what masks alone limit: no token sees further back than a chunk has."""
        windows = {index: limit.tokens for index, limit in self._limits.items()}
        return [
            replace(layout, window=windows.get(index, layout.window))
            for index, layout in enumerate(layouts)
        ]

    def _find_states(self, tokens: torch.Tensor) -> None:
        self._put(_Probe())
        try:
            modules = find_stateful(self._model, tokens.unsqueeze(0))
        finally:
            self._put(None)
        if modules:
            self.recurrent = RecurrentLayers(modules)
        elif self._model._is_stateful:
            name = type(self._model).__name__
            raise UnsupportedModel(
                f"{name} cannot be served: its layers keep states that no cache shows", "model"
            )

    def _run_probe(
        self, tokens: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[_Probe, torch.Tensor]:
        """Runs a forward in which every attention returns zeros and the probe records it."""
        probe = _Probe()
        self._put(probe)
        try:
            return probe, self._run(tokens, positions, None)
        finally:
            self._put(None)

    def _put(self, layer: AttentionLayer | None) -> None:
        """Puts ``layer`` on all modules, or takes it off."""
        for module in self._model.modules():
            if layer is not None:
                setattr(module, LAYER, layer)
            elif hasattr(module, LAYER):
                delattr(module, LAYER)

    def _check_layers(self, probe: _Probe) -> None:
        """Raises unless layers attend through the registry, with their declared windows."""
        config = self._model.config.get_text_config(decoder=True)
        name = type(self._model).__name__
        if not probe.calls and self.recurrent is None:
            raise UnsupportedModel(
                f"{name} cannot be served: no layer attends through transformers' attention "
                "registry",
                "model",
            )
        layer_types = getattr(config, "layer_types", None) or []
        layer_types = layer_types[self._layers.start : self._layers.stop]
        self._has_windows = any(window is not None for window in probe.windows)
        if len(layer_types) != len(probe.windows):
            return  # layers without attention: the comparison of logits decides
        for index, layer_type in enumerate(layer_types):
            window = probe.windows[index]
            if layer_type == "chunked_attention":
                self._limits[index] = MaskLimit(config, CHUNK)
            declared = layer_type in ("sliding_attention", "hybrid_sliding")
            if declared != (window is not None):
                raise UnsupportedModel(
                    f"{name} cannot be served: a layer of type {layer_type} attends with "
                    f"window {window}",
                    "model",
                )


def added_states(given: GivenInputs, tokens: int) -> dict[str, Any]:
    """What a decoder of transformers takes for rows whose first layers get features of an image.

    Source: DeepStack (Meng et al., 2024).
    """
    if given.added is None:
        return {}
    mask = torch.zeros(1, tokens, dtype=torch.bool, device=given.index.device)
    mask[0, given.index] = True
    return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(given.added.unbind(1))}


def _may_keep_states(model: PreTrainedModel) -> bool:
    """Whether a layer may keep a state beside keys and values: only then a forward looks for it."""
    config = model.config.get_text_config(decoder=True)
    layer_types = set(getattr(config, "layer_types", None) or [])
    return bool(model._is_stateful or layer_types - ATTENTION_TYPES)
