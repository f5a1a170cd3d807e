"""Layers that keep a state of fixed size per request: gated delta rule, SSD, short convolutions.

transformers gives such layers one interface: a cache object with conv and recurrent states. A step
packs rows of several requests into [1, T, H]. Here each such module is called with the rows cut
apart and a small cache object in place of transformers' own: rows of one token together as a batch
[R, 1, H], each chunk of a prompt alone. Modules are found by watching which of them ask the cache
for states in a forward; their names do not matter.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.state_tensors import Rows, StateLayout, StateRows, StateTensors

Key = tuple[str, int]
"""A state of a module: its kind (``conv``, ``recurrent``, ``linear``) and number."""

_CALLS = {
    "get_conv_state": "conv",
    "update_conv_state": "conv",
    "get_recurrent_state": "recurrent",
    "update_recurrent_state": "recurrent",
    "get_linear_cache": "linear",
    "set_linear_cache": "linear",
}


_BY_FLA = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
"""What transformers replaces by flash-linear-attention (the package ``fla``) where it finds it."""


@dataclass(slots=True)
class StatefulModule:
    """A module that keeps states, the argument that brings it the cache, and its states."""

    module: nn.Module
    argument: str
    states: dict[Key, StateLayout]


class _Watched:
    """Stands for the cache before one module, and records which states that asks for."""

    def __init__(self, cache: Any, seen: dict[Key, int]) -> None:
        self.cache, self.seen = cache, seen

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.cache, name)
        kind = _CALLS.get(name)
        if kind is None:
            return value
        parameters = inspect.signature(value)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            given = parameters.bind(*args, **kwargs).arguments
            self.seen[kind, int(given.get("state_idx", 0))] = int(given["layer_idx"])
            return value(*args, **kwargs)

        return recorded


@torch.inference_mode()
def find_stateful(model: PreTrainedModel, tokens: torch.Tensor) -> list[StatefulModule]:
    """The modules of ``model`` that keep states, found in a forward over ``tokens`` [1, T].

    The modules' attention must be able to run: the caller has put layers on them.
    """
    seen: dict[nn.Module, tuple[str, Any, dict[Key, int]]] = {}

    def watch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        for name, value in kwargs.items():
            cache = value.cache if isinstance(value, _Watched) else value
            if isinstance(cache, Cache):
                _, _, keys = seen.setdefault(module, (name, cache, {}))
                kwargs[name] = _Watched(cache, keys)
        return args, kwargs

    hooks = [
        module.register_forward_pre_hook(watch, with_kwargs=True)
        for module in model.modules()
        if module is not model and module is not model.base_model
    ]
    try:
        model(input_ids=tokens, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    stateful = []
    for module, (argument, cache, keys) in seen.items():
        states: dict[Key, StateLayout] = {}
        for (kind, number), layer in sorted(keys.items()):
            state = _read(cache, kind, layer, number)
            if isinstance(state, torch.Tensor):
                states[kind, number] = StateLayout(tuple(state.shape[1:]), state.dtype)
        if states:
            stateful.append(StatefulModule(module, argument, states))
    return stateful


def _read(cache: Any, kind: str, layer: int, number: int) -> Any:
    if kind == "linear":
        return cache.get_linear_cache(layer)
    read = cache.get_conv_state if kind == "conv" else cache.get_recurrent_state
    return read(layer, number)


class _RowCache:
    """What a module sees as transformers' cache: states of the rows that it is called with."""

    def __init__(self, states: dict[Key, torch.Tensor], widths: dict[Key, StateLayout]) -> None:
        self.states = states  # [rows, *shape]; empty where the rows have no past
        self._widths = widths

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(("recurrent", state_idx))

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return self.states.get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.states["linear", 0] = linear_cache

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Appends [rows, C, T]; returns all columns that the convolution may see."""
        key, width = ("conv", state_idx), self._widths["conv", state_idx].shape[-1]
        before = self.states.get(key)
        if before is not None:
            full = torch.cat([before, conv_states], dim=-1)
        else:
            missing = max(width - conv_states.shape[-1], 0)
            full = nn.functional.pad(conv_states, (missing, 0))
        self.states[key] = full[..., full.shape[-1] - width :]
        return full

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self.states["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        return keys, values


@dataclass(slots=True)
class Wave:
    """Tokens that continue states one by one, one of each row."""

    tokens: torch.Tensor  # [N] int64
    read: torch.Tensor  # [N]
    write: torch.Tensor  # [N]


@dataclass(slots=True)
class StepPlan:
    """How a step's tokens are cut, the same for all of its layers."""

    rows: StateRows
    starts: Rows  # [R + 1], the rows' first tokens
    single: torch.Tensor  # [N] int64, tokens of rows with a past: a new one alone, or with drafts
    waves: list[Wave]  # the same tokens; the draft of a row is in the wave behind the one before
    chunks: list[tuple[int, int, int, int, bool]]  # start, end, rows to read and write, has a past


class RecurrentLayers:
    """All stateful modules of a model, called row by row.

    ``stepwise`` continues a prompt token by token in all of them. Modules whose form over many
    tokens does not read the state that it should start from (Mamba 1's scan in transformers) are
    found when they first continue a prompt, and do so by themselves.
    """

    def __init__(self, modules: list[StatefulModule]) -> None:
        self.layouts = [layout for stateful in modules for layout in stateful.states.values()]
        self.modules: list[RowByRow] = []
        self.stepwise = False
        self._states: StateTensors | None = None
        self._plan: StepPlan | None = None
        first = 0
        for stateful in modules:
            keys = {key: first + number for number, key in enumerate(stateful.states)}
            first += len(keys)
            self.modules.append(RowByRow(self, stateful, keys, stateful.module.forward))
            stateful.module.forward = self.modules[-1]

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one request's states, held twice for each slot."""
        return sum(layout.bytes for layout in self.layouts)

    def fuse(self, fused: "list[FusedForward | None]") -> None:
        """From now on each module computes by its ``fused`` forward, if it has one.

        States of such modules are float32.
        """
        for layer, forward in zip(self.modules, fused, strict=True):
            layer.fused = forward
            for key, number in layer.numbers.items():
                layout = layer.own.states[key]
                kept = layout if forward is None else replace(layout, dtype=torch.float32)
                self.layouts[number] = kept

    @property
    def is_fused(self) -> bool:
        """Whether all modules compute by fused forwards."""
        return all(layer.fused is not None for layer in self.modules)

    @property
    def lacks_kernels(self) -> bool:
        """Whether there are Triton kernels for the layers, in a package that is not installed."""
        files = [sys.modules[type(layer.own.module).__module__] for layer in self.modules]
        by_fla = any(hasattr(file, name) for file in files for name in _BY_FLA)
        return by_fla and importlib.util.find_spec("fla") is None

    @property
    def states(self) -> StateTensors:
        """Where the layers keep their states."""
        assert self._states is not None, "before a runner starts"
        return self._states

    def bind(self, states: StateTensors) -> None:
        """The layers keep their states in ``states`` from now on."""
        self._states = states

    def begin(self, inputs: StepInputs) -> None:
        """A step begins.

        Raises:
            CacheError: a row's slot does not have the state of its request.
        """
        assert self._states is not None, "a step before its states are bound"
        starts = np.asarray(inputs.batch.query_start_cpu, np.int64)
        after = np.asarray(inputs.batch.kv_len_cpu, np.int64)
        lengths = np.diff(starts)
        slots = np.arange(len(after)) if inputs.slots is None else inputs.slots.astype(np.int64)
        has_past = after > lengths
        drafting = has_past & (lengths > 1) & (np.arange(len(after)) < inputs.first_prompt)
        rows = self._states.begin(slots, after - lengths, after, drafting)
        single = (has_past & (lengths == 1)) | drafting
        others = np.flatnonzero(~single).tolist()
        waves = _waves(rows, starts, np.flatnonzero(single), inputs.input_ids.device)
        tokens = [wave.tokens for wave in waves]
        self._plan = StepPlan(
            rows,
            starts,
            torch.cat(tokens) if tokens else inputs.sampled.new_empty(0),
            waves,
            [
                (
                    int(starts[row]),
                    int(starts[row + 1]),
                    int(rows.read[row]),
                    int(rows.write[row]),
                    bool(rows.before[row] > 0),
                )
                for row in others
            ],
        )

    def begin_recorded(self, read: torch.Tensor, write: torch.Tensor) -> None:
        """A step of one token of each row [R] begins, which reads and writes these rows of states.

        `StateTensors.advance` knows of it.
        """
        tokens = torch.arange(len(read), device=read.device)
        none = np.zeros(0, np.int64)
        rows = StateRows(none, none, none, none, none, none)
        self._plan = StepPlan(rows, none, tokens, [Wave(tokens, read, write)], [])

    def end(self, *, complete: bool) -> None:
        """The step is over; its states count if it is ``complete``."""
        if complete and self._plan is not None and self._states is not None:
            self._states.commit(self._plan.rows)
        self._plan = None

    @property
    def plan(self) -> StepPlan | None:
        """How the step under way is cut; None outside of one."""
        return self._plan

    def tensor(self, number: int) -> torch.Tensor:
        """State ``number`` of all rows."""
        assert self._states is not None
        return self._states.tensors[number]


class FusedForward(Protocol):
    """Computes all rows of a step at once."""

    def __call__(
        self,
        plan: StepPlan,
        states: dict[Key, torch.Tensor],  # [rows, *shape] float32, changed in place
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any: ...


class RowByRow:
    """The forward of one stateful module: its own one, for each row or batch of rows.

    A ``fused`` forward takes its place where there is one.
    """

    def __init__(
        self,
        layers: RecurrentLayers,
        stateful: StatefulModule,
        keys: dict[Key, int],
        forward: Callable[..., Any],
    ) -> None:
        self.own = stateful
        self.numbers = keys
        self.fused: FusedForward | None = None
        self._forgets: bool | None = None  # whether several tokens ignore the state; None: not seen
        self._layers = layers
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self.step()
        if step is None:
            return self._forward(*args, **kwargs)
        plan, states = step
        if self.fused is not None:
            return self.fused(plan, states, args, kwargs)
        tokens = _num_tokens(args, kwargs)
        parts: list[tuple[torch.Tensor | slice, Any]] = []
        for wave in plan.waves:
            cut = _cut((args, kwargs), tokens, wave.tokens)
            output = self._call(cut, wave.read, wave.write)
            parts.append((wave.tokens, _map(output, lambda tensor: tensor.transpose(0, 1))))
        for start, end, read, write, past in plan.chunks:
            if past and end - start > 1 and self._forgets is None:
                cut = _cut((args, kwargs), tokens, slice(start, end))
                before = torch.tensor([read], device=plan.single.device)
                self._forgets = self._forgets_past(cut, before)
            for first, last, source in self._pieces(start, end, read, write, past):
                part = slice(first, last)
                cut = _cut((args, kwargs), tokens, part)
                device = plan.single.device
                to = torch.tensor([write], device=device)
                from_ = None if source is None else torch.tensor([source], device=device)
                parts.append((part, self._call(cut, from_, to)))
        return _join(parts, tokens)

    def step(self) -> tuple[StepPlan, dict[Key, torch.Tensor]] | None:
        """How the step under way is cut, and all rows of the module's states; None outside."""
        plan = self._layers.plan
        if plan is None:
            return None
        return plan, {key: self._layers.tensor(number) for key, number in self.numbers.items()}

    def give_way(self, module: nn.Module, fused: FusedForward) -> None:
        """``module`` stands in the model for the one that was found, which is forgotten."""
        self.own.module, self._forward, self.fused = module, module.forward, fused

    def _pieces(
        self, start: int, end: int, read: int, write: int, past: bool
    ) -> list[tuple[int, int, int | None]]:
        """(first token, one past the last, row to read or None) of the calls for one chunk."""
        if not (past and (self._layers.stepwise or self._forgets)):
            return [(start, end, read if past else None)]
        return [(at, at + 1, read if at == start else write) for at in range(start, end)]

    def _forgets_past(self, cut: Any, read: torch.Tensor) -> bool:
        """Whether the module says the same of several tokens behind a state and behind another."""
        kinds = [key for key in self.numbers if key[0] != "conv"]
        if not kinds:
            return False  # columns of a convolution are put before the tokens here
        args, kwargs = cut
        said = []
        for change in (0, 1):
            states = self._states(read)
            for key in kinds:
                states[key] += change
            cache = _RowCache(states, self.own.states)
            said.append(self._forward(*args, **{**kwargs, self.own.argument: cache}))
        one, other = (output[0] if isinstance(output, tuple) else output for output in said)
        return bool(torch.equal(one, other))

    def _states(self, read: torch.Tensor) -> dict[Key, torch.Tensor]:
        """Copies of the states in the rows ``read`` [N]."""
        return {
            key: self._layers.tensor(number).index_select(0, read)
            for key, number in self.numbers.items()
        }

    def _call(self, cut: Any, read: torch.Tensor | None, write: torch.Tensor) -> Any:
        args, kwargs = cut
        cache = _RowCache({} if read is None else self._states(read), self.own.states)
        output = self._forward(*args, **{**kwargs, self.own.argument: cache})
        for key, number in self.numbers.items():
            kept = self._layers.tensor(number)
            kept.index_copy_(0, write, cache.states[key].to(kept.dtype))
        return output


def _waves(rows: StateRows, starts: Rows, among: Rows, device: torch.device) -> list[Wave]:
    """Token after token of the rows ``among`` [N], which begin at ``starts`` [R + 1]."""
    waves: list[Wave] = []
    read = rows.read[among]
    while len(among):
        tokens = starts[among] + len(waves)
        more = rows.drafts[among] > len(waves)
        write = rows.write[among]
        if rows.each is not None:
            write = np.where(more, rows.each[tokens], write)
        waves.append(Wave(*(torch.from_numpy(array).to(device) for array in (tokens, read, write))))
        among, read = among[more], write[more]
    return waves


def _num_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    hidden = args[0] if args else kwargs["hidden_states"]
    tokens: int = hidden.shape[1]
    return tokens


def _cut(value: Any, tokens: int, part: torch.Tensor | slice) -> Any:
    """The tokens ``part`` of tensors [1, T, ...]: a slice [1, L, ...], or an index [N, 1, ...]."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2 or tensor.shape[0] != 1 or tensor.shape[1] != tokens:
            return tensor
        return tensor[:, part] if isinstance(part, slice) else tensor[:, part].transpose(0, 1)

    return _map(value, cut)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value) if value.dim() >= 2 else value
    if isinstance(value, tuple):
        return tuple(_map(part, change) for part in value)
    if isinstance(value, dict):
        return {name: _map(part, change) for name, part in value.items()}
    return value


def _join(parts: list[tuple[torch.Tensor | slice, Any]], tokens: int) -> Any:
    """The outputs of all parts [1, L, ...] at their places of [1, T, ...]."""
    sample = parts[0][1]
    if isinstance(sample, tuple):
        return tuple(
            _join([(part, output[index]) for part, output in parts], tokens)
            for index in range(len(sample))
        )
    if not isinstance(sample, torch.Tensor) or len(parts) == 1:
        return sample
    if sum(output.shape[1] for _, output in parts) != tokens:
        return sample  # not of tokens: a module's own state, which its layer ignores
    whole = sample.new_empty(1, tokens, *sample.shape[2:])
    for part, output in parts:
        whole[:, part] = output
    return whole
