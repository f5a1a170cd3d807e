"""Recurrent layers on the compiled kernels: all rows of a step in one call a layer.

Modules of transformers call functions of their file for the parts that keep a state: a causal
convolution, the chunked gated delta rule, Mamba 2's chunked scan. Here a module runs a copy of its
own forward in which those names mean compiled ones, which know the rows of the step. So one file
serves all families that are built of these parts, and the projections stay their own.
"""

import inspect
import logging
import math
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.cpu.build_decoder import TOLERANCE
from rayfin.actors.runner.models.recurrent import FusedForward, Key, RowByRow, StepPlan
from rayfin.actors.runner.models.replace import Replaceable, logit_difference, probe_logits
from rayfin.kernels.cpu.kernels import Activation, CpuKernels
from rayfin.kernels.cpu.recurrent_rows import MAX_TAPS, RecurrentKernels, RecurrentRows

logger = logging.getLogger(__name__)

CONV, DELTA, SCAN = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
ACTIVATIONS = {None: Activation.NONE, "silu": Activation.SILU, "swish": Activation.SILU}
STATES: tuple[set[Key], ...] = ({("conv", 0)}, {("conv", 0), ("recurrent", 0)})
"""States of the modules that are known here."""


@torch.inference_mode()
def fuse_recurrent(paged: Replaceable, kernels: CpuKernels) -> bool:
    """Puts the recurrent layers that are recognized on compiled kernels; whether there are any.

    If the model then gives other logits, they stay as they are.
    """
    layers = paged.recurrent
    if layers is None:
        return False
    row_kernels = RecurrentKernels(kernels)
    fused = [_fused(row_kernels, layer) for layer in layers.modules]
    if not any(fused):
        return False
    name, expected = type(paged.transformer).__name__, probe_logits(paged, paged)
    layers.fuse(fused)
    try:
        difference = logit_difference(paged, paged, expected)
        if difference <= TOLERANCE[paged.dtype]:
            return True
        logger.warning("%s keeps its layers: logits would differ by %.1e", name, difference)
    except UnrecognizedModule as error:
        logger.info("%s keeps its layers: %s", name, error)
    layers.fuse([None] * len(fused))
    return False


def _fused(kernels: RecurrentKernels, layer: RowByRow) -> FusedForward | None:
    """The compiled form of a module, or None where its parts are others."""
    forward = inspect.unwrap(type(layer.own.module).forward)
    called = forward.__code__.co_names
    rules = [name for name in (DELTA, SCAN) if name in called]
    states = set(layer.own.states)
    if states not in STATES or CONV not in called or len(rules) != len(states) - 1:
        return None
    return _FusedModule(kernels, layer.own.module, layer.own.argument, forward)


class _NoCache:
    """What a module sees as transformers' cache: nothing, as the compiled parts have the states."""

    def get_conv_state(self, *_: Any, **__: Any) -> None: ...

    def get_recurrent_state(self, *_: Any, **__: Any) -> None: ...

    def update_recurrent_state(self, *_: Any, **__: Any) -> None: ...

    def update_conv_state(self, conv_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return conv_states

    def is_recording_past(self, *_: Any) -> bool:
        return False


class _FusedModule:
    """A module's own forward over all rows of a step, with compiled parts in it."""

    def __init__(
        self,
        kernels: RecurrentKernels,
        module: nn.Module,
        argument: str,
        forward: Callable[..., Any],
    ) -> None:
        assert isinstance(forward, FunctionType)
        parts = {CONV: self._conv, DELTA: self._delta_rule, SCAN: self._scan}
        names = {**forward.__globals__, **parts}
        copy = FunctionType(
            forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
        )
        copy.__kwdefaults__ = forward.__kwdefaults__
        self._forward = MethodType(copy, module)
        self._kernels, self._argument = kernels, argument
        self._taps: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._plan: StepPlan | None = None
        self._rows: RecurrentRows | None = None
        self._states: dict[Key, torch.Tensor] = {}

    def __call__(
        self,
        plan: StepPlan,
        states: dict[Key, torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        rows = plan.rows
        self._plan, self._states = plan, states
        self._rows = RecurrentRows(plan.starts, rows.read, rows.write, rows.before, rows.each)
        return self._forward(*args, **{**kwargs, self._argument: _NoCache()})

    def _conv(
        self,
        hidden_states: torch.Tensor,  # [1, C, T]
        weight: torch.Tensor,  # [C, K]
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[1, C, T]."""
        assert self._rows is not None
        if activation not in ACTIVATIONS or weight.shape[1] > MAX_TAPS:
            raise UnrecognizedModule(f"a convolution of {weight.shape[1]} taps, {activation}")
        if self._taps is None:
            self._taps = _dense(weight.T), None if bias is None else _dense(bias)
        x = _dense(hidden_states[0].T)
        activate = ACTIVATIONS[activation]
        y = self._kernels.short_conv(self._rows, x, *self._taps, self._states["conv", 0], activate)
        return y.to(hidden_states.dtype).T.unsqueeze(0)

    def _delta_rule(
        self,
        query: torch.Tensor,  # [1, T, Hk, Dk]
        key: torch.Tensor,
        value: torch.Tensor,  # [1, T, Hv, Dv]
        g: torch.Tensor,  # [1, T, Hv]
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, T, Hv, Dv], and no state: it is written."""
        assert self._rows is not None
        out = self._kernels.delta_rule(
            self._rows,
            _dense_heads(query[0]),
            _dense_heads(key[0]),
            _dense_heads(value[0]),
            _dense(g[0]),
            _dense(beta[0]),
            self._states["recurrent", 0],
            normalize=use_qk_l2norm_in_kernel,
        )
        return out.to(query.dtype).unsqueeze(0), None

    def _scan(
        self,
        hidden_states: torch.Tensor,  # [1, T, H, P]
        dt: torch.Tensor,  # [1, T, H]
        A: torch.Tensor,  # [H]
        B: torch.Tensor,  # [1, T, G, N]
        C: torch.Tensor,
        D: torch.Tensor | None = None,  # [H]
        dt_bias: torch.Tensor | None = None,  # [H]
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        return_final_states: bool = False,
        **_: Any,
    ) -> Any:
        """[1, T, H, P], and no state: it is written."""
        assert self._rows is not None and self._plan is not None
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = nn.functional.softplus(dt)
        if tuple(dt_limit) != (0.0, math.inf):
            limited = dt.clamp(*dt_limit)
            # transformers limits prompts only, not tokens that continue a state
            limited[:, self._plan.single] = dt[:, self._plan.single]
            dt = limited
        out = self._kernels.ssd(
            self._rows,
            _dense_heads(hidden_states[0]),
            dt[0].float(),
            _dense(A),
            _dense_heads(B[0]),
            _dense_heads(C[0]),
            None if D is None else _dense(D),
            self._states["recurrent", 0],
        ).unsqueeze(0)
        return (out, None) if return_final_states else out


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.detach().float().contiguous()


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] float32 whose heads are dense."""
    x = x.float()
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
