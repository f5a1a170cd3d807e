"""Layers that keep a state per request: short convolutions, the gated delta rule, SSD.

Each is one call for all rows of a step (kernels/cpu/recurrent/states.h). A row's result and its new
state do not depend on the other rows, nor on how its tokens are cut into steps, to the last bit.
Tensors are float32.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Matrix

MAX_TAPS = 16
"""The most taps of a short convolution (kTaps in states.h)."""

_P, _I64 = ctypes.c_void_p, ctypes.c_int64


def _fields(pointers: str, integers: str) -> list[tuple[str, type]]:
    return [(name, _P) for name in pointers.split()] + [(name, _I64) for name in integers.split()]


class _Rows(ctypes.Structure):
    _fields_ = _fields("starts read write past each", "rows")


class _ShortConv(ctypes.Structure):
    _fields_ = _fields("x weight bias states y", "x_stride channels taps width activation")


class _DeltaRule(ctypes.Structure):
    _fields_ = _fields(
        "q k v g beta states y",
        "q_stride k_stride v_stride key_heads value_heads key_dim value_dim normalize",
    )


class _GatedDelta(ctypes.Structure):
    _fields_ = [
        *_fields(
            "x conv conv_bias rate shift norm conv_states states workspace y",
            "x_stride taps width activation key_heads value_heads key_dim value_dim normalize",
        ),
        ("eps", ctypes.c_float),
        ("beta_scale", ctypes.c_float),
    ]


class _DeltaLayer(ctypes.Structure):
    _fields_ = [
        *_fields(
            "x rule_norm mlp_norm in_ out gate_up down gate_up_bias down_bias workspace",
            "activation",
        ),
        ("rule_eps", ctypes.c_float),
        ("mlp_eps", ctypes.c_float),
    ]


class _Ssd(ctypes.Structure):
    _fields_ = _fields(
        "x dt a b c d states y",
        "x_stride b_stride c_stride heads groups head_dim state_dim",
    )


Numbers = npt.NDArray[np.int64]


class RecurrentRows:
    """The rows of a step: which state each continues, and where its new one goes.

    No row may write a state that another one reads or writes, or that it reads itself. With
    drafts the states behind single tokens are written too: ``each``.
    """

    def __init__(
        self,
        starts: Numbers,  # [R + 1], first tokens
        read: Numbers,  # [R], states; not used without a past
        write: Numbers,  # [R]
        past: Numbers,  # [R], 0 where a state of zeros is continued
        each: Numbers | None = None,  # [T]: where the state behind a token goes beside, or -1
    ) -> None:
        arrays = (starts, read, write, past, *(() if each is None else (each,)))
        self._arrays = [np.ascontiguousarray(array, np.int64) for array in arrays]
        self.tokens = int(starts[-1])
        assert each is None or len(each) == self.tokens
        pointers = [array.ctypes.data for array in self._arrays]
        if each is None:
            pointers.append(0)
        self.struct = _Rows(*pointers, len(write))


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """What a layer of the gated delta rule has between its projections; tensors float32, dense.

    Its input has C = 2 Hk Dk + Hv Dv channels of the convolution, a gate of Hv Dv, and b and a of
    Hv each: beta = ``beta_scale`` sigmoid(b), g = ``rate`` softplus(a + ``shift``).
    """

    conv: torch.Tensor  # [K, C]: the tap of the oldest input first
    conv_bias: torch.Tensor | None  # [C]
    activation: Activation  # of the convolution
    rate: torch.Tensor  # [Hv]
    shift: torch.Tensor  # [Hv]
    norm: torch.Tensor  # [Dv], of a head's output, before it is multiplied by SiLU of the gate
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float
    beta_scale: float = 1.0

    def __post_init__(self) -> None:
        taps, channels = self.conv.shape
        values = self.value_heads * self.value_dim
        assert channels == 2 * self.key_heads * self.key_dim + values and 0 < taps <= MAX_TAPS
        assert self.rate.shape == self.shift.shape == (self.value_heads,)
        assert self.norm.shape == (self.value_dim,) and self.value_heads % self.key_heads == 0
        tensors = [self.conv, self.rate, self.shift, self.norm]
        tensors += [] if self.conv_bias is None else [self.conv_bias]
        assert all(one.is_contiguous() and one.dtype == torch.float32 for one in tensors)

    @property
    def columns(self) -> int:
        """Numbers of a token that the layer reads."""
        return self.conv.shape[1] + self.value_heads * (self.value_dim + 2)

    @property
    def floats(self) -> int:
        """Numbers of a token that its parts hand on."""
        return self.conv.shape[1] + 2 * self.value_heads


@dataclass(frozen=True, slots=True)
class DeltaLayer:
    """A decoder layer of the gated delta rule: x += rule(norm(x)), then x += mlp(norm(x))."""

    rule: GatedDelta
    rule_norm: torch.Tensor  # [H] float32, of an RMS norm
    rule_eps: float
    into: Matrix  # H -> ``rule.columns``
    out: Matrix  # Hv Dv -> H
    mlp_norm: torch.Tensor  # [H]
    mlp_eps: float
    gate_up: Matrix  # paired, H -> F
    down: Matrix  # F -> H
    gate_up_bias: torch.Tensor | None  # [2 F]
    down_bias: torch.Tensor | None  # [H]
    activation: Activation  # of the MLP

    def __post_init__(self) -> None:
        hidden, values = len(self.rule_norm), self.rule.value_heads * self.rule.value_dim
        assert self.rule_norm.shape == self.mlp_norm.shape
        assert (self.into.inputs, self.into.columns) == (hidden, self.rule.columns)
        assert (self.out.inputs, self.out.columns) == (values, hidden)
        assert (self.gate_up.inputs, self.gate_up.columns) == (hidden, self.down.inputs)
        assert self.gate_up.paired and self.down.columns == hidden
        biases = [(self.gate_up_bias, self.gate_up.outputs), (self.down_bias, hidden)]
        assert all(bias is None or bias.shape == (size,) for bias, size in biases)
        tensors = [self.rule_norm, self.mlp_norm, *(bias for bias, _ in biases if bias is not None)]
        assert all(one.is_contiguous() and one.dtype == torch.float32 for one in tensors)

    @property
    def floats(self) -> int:
        """Numbers of a token that its parts hand on."""
        return self.into.inputs + self.into.columns + self.out.inputs + self.down.inputs


class RecurrentKernels:
    """The compiled recurrent layers, on the threads of ``kernels``; one call at a time."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels
        self._workspace = torch.empty(0)

    def short_conv(
        self,
        rows: RecurrentRows,
        x: torch.Tensor,  # [T, C], rows dense
        weight: torch.Tensor,  # [K, C]: the tap of the oldest input first
        bias: torch.Tensor | None,  # [C]
        states: torch.Tensor,  # [slots, C, W], W >= K - 1: the last inputs
        activation: Activation,
    ) -> torch.Tensor:
        """act(bias + the depthwise causal convolution of x): [T, C]."""
        taps, channels = weight.shape
        _check(x, (channels,))
        assert weight.is_contiguous() and states.is_contiguous() and 0 < taps <= MAX_TAPS
        assert states.shape[1] == channels and states.shape[2] >= taps - 1
        assert bias is None or (bias.is_contiguous() and len(bias) == channels)
        y = x.new_empty(x.shape)
        call = _ShortConv(
            *(x.data_ptr(), weight.data_ptr(), _address(bias), states.data_ptr(), y.data_ptr()),
            *(x.stride(0), channels, taps, states.shape[2], activation),
        )
        self._run(self._kernels.library.rayfin_short_conv, rows, call, len(x))
        return y

    def delta_rule(
        self,
        rows: RecurrentRows,
        q: torch.Tensor,  # [T, Hk, Dk], heads dense
        k: torch.Tensor,  # [T, Hk, Dk], heads dense
        v: torch.Tensor,  # [T, Hv, Dv], heads dense; Hv a multiple of Hk
        g: torch.Tensor,  # [T, Hv], the logarithm of the decay
        beta: torch.Tensor,  # [T, Hv]
        states: torch.Tensor,  # [slots, Hv, Dk, Dv]
        *,
        normalize: bool,
    ) -> torch.Tensor:
        """The gated delta rule (``reference.delta_rule``): [T, Hv, Dv].

        Queries are divided by the root of Dk; ``normalize`` first gives q and k the length 1.
        """
        _, key_heads, key_dim = q.shape
        tokens, value_heads, value_dim = v.shape
        _check(q, (key_heads, key_dim))
        _check(k, (key_heads, key_dim))
        _check(v, (value_heads, value_dim))
        assert g.shape == beta.shape == (tokens, value_heads) and value_heads % key_heads == 0
        assert states.shape[1:] == (value_heads, key_dim, value_dim) and states.is_contiguous()
        g, beta = g.contiguous(), beta.contiguous()
        y = v.new_empty(v.shape)
        call = _DeltaRule(
            *(tensor.data_ptr() for tensor in (q, k, v, g, beta, states, y)),
            *(q.stride(0), k.stride(0), v.stride(0)),
            *(key_heads, value_heads, key_dim, value_dim, normalize),
        )
        self._run(self._kernels.library.rayfin_delta_rule, rows, call, tokens)
        return y

    def gated_delta(
        self,
        rows: RecurrentRows,
        x: torch.Tensor,  # [T, columns], rows dense
        layer: GatedDelta,
        conv_states: torch.Tensor,  # [slots, C, W], W >= K - 1
        states: torch.Tensor,  # [slots, Hv, Dk, Dv]
    ) -> torch.Tensor:
        """Convolution, gates, gated delta rule and gated norm of ``layer``: [T, Hv Dv]."""
        _check(x, (layer.columns,))
        y = x.new_empty(len(x), layer.value_heads * layer.value_dim)
        call = self._rule(layer, len(x), conv_states, states)
        call.x, call.x_stride, call.y = x.data_ptr(), x.stride(0), y.data_ptr()
        self._run(self._kernels.library.rayfin_gated_delta, rows, call, len(x))
        return y

    def delta_layer(
        self,
        rows: RecurrentRows,
        x: torch.Tensor,  # [T, H], dense, changed in place
        layer: DeltaLayer,
        conv_states: torch.Tensor,  # [slots, C, W], W >= K - 1
        states: torch.Tensor,  # [slots, Hv, Dk, Dv]
    ) -> None:
        """A whole decoder layer; each part gives what it gives alone, to the last bit."""
        assert x.is_contiguous() and rows.tokens == len(x)
        _check(x, layer.rule_norm.shape)
        rule = self._rule(layer.rule, len(x), conv_states, states, layer.floats)
        call = _DeltaLayer(
            *(x.data_ptr(), layer.rule_norm.data_ptr(), layer.mlp_norm.data_ptr()),
            *(one.handle for one in (layer.into, layer.out, layer.gate_up, layer.down)),
            *(_address(layer.gate_up_bias), _address(layer.down_bias)),
            rule.workspace + 4 * len(x) * layer.rule.floats,
            *(layer.activation, layer.rule_eps, layer.mlp_eps),
        )
        structs = (ctypes.byref(one) for one in (rows.struct, rule, call))
        self._kernels.library.rayfin_delta_layer(self._kernels.pool, *structs)

    def _rule(
        self,
        layer: GatedDelta,
        tokens: int,
        conv_states: torch.Tensor,
        states: torch.Tensor,
        more: int = 0,  # numbers of a token behind the rule's own workspace
    ) -> _GatedDelta:
        taps, channels = layer.conv.shape
        heads = (layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim)
        assert conv_states.shape[1] == channels and conv_states.shape[2] >= taps - 1
        assert states.shape[1:] == (layer.value_heads, layer.key_dim, layer.value_dim)
        assert states.is_contiguous() and conv_states.is_contiguous()
        needed = tokens * (layer.floats + more)
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed)
        return _GatedDelta(
            *(None, layer.conv.data_ptr(), _address(layer.conv_bias)),
            *(one.data_ptr() for one in (layer.rate, layer.shift, layer.norm)),
            *(one.data_ptr() for one in (conv_states, states, self._workspace)),
            *(None, 0, taps, conv_states.shape[2], layer.activation, *heads, 1),
            *(layer.eps, layer.beta_scale),
        )

    def ssd(
        self,
        rows: RecurrentRows,
        x: torch.Tensor,  # [T, H, P], heads dense
        dt: torch.Tensor,  # [T, H]
        a: torch.Tensor,  # [H]
        b: torch.Tensor,  # [T, G, N], groups dense; H a multiple of G
        c: torch.Tensor,  # [T, G, N], groups dense
        d: torch.Tensor | None,  # [H]
        states: torch.Tensor,  # [slots, H, P, N]
    ) -> torch.Tensor:
        """Mamba 2's state space recurrence (``reference.ssd``): [T, H, P]."""
        tokens, heads, head_dim = x.shape
        _, groups, state_dim = b.shape
        _check(x, (heads, head_dim))
        _check(b, (groups, state_dim))
        _check(c, (groups, state_dim))
        assert dt.shape == (tokens, heads) and a.shape == (heads,) and heads % groups == 0
        assert states.shape[1:] == (heads, head_dim, state_dim) and states.is_contiguous()
        assert d is None or (d.shape == (heads,) and d.is_contiguous())
        dt, a = dt.contiguous(), a.contiguous()
        y = x.new_empty(x.shape)
        call = _Ssd(
            *(x.data_ptr(), dt.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr()),
            *(_address(d), states.data_ptr(), y.data_ptr()),
            *(x.stride(0), b.stride(0), c.stride(0), heads, groups, head_dim, state_dim),
        )
        self._run(self._kernels.library.rayfin_ssd, rows, call, tokens)
        return y

    def _run(
        self,
        function: Callable[..., None],
        rows: RecurrentRows,
        call: ctypes.Structure,
        tokens: int,
    ) -> None:
        assert rows.tokens == tokens, "rows of other tokens"
        function(self._kernels.pool, ctypes.byref(rows.struct), ctypes.byref(call))


def _check(tensor: torch.Tensor, row: tuple[int, ...]) -> None:
    """Asserts float32 [T, *row] whose rows are dense."""
    assert tensor.dtype == torch.float32 and tensor.shape[1:] == row, tensor.shape
    stride = 1
    for size, step in zip(reversed(row), reversed(tensor.stride()[1:]), strict=True):
        assert step == stride or size == 1, tensor.stride()
        stride *= size


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
