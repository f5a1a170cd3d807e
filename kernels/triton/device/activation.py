"""The activations of gates, within kernels."""

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU = tl.constexpr(2)
CLAMPED_SWISH = tl.constexpr(3)

ACTIVATIONS = {"silu": SILU.value, "gelu_tanh": GELU_TANH.value, "gelu": GELU.value}
"""The kernels' ``ACTIVATION`` by name."""


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of float32 values of any shape."""
    if ACTIVATION == SILU:
        x = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == GELU_TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))  # (1 + tanh) / 2
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit
def gated(
    gate,
    up,
    ACTIVATION: tl.constexpr,
    SLOPE: tl.constexpr,  # of CLAMPED_SWISH, as is the next
    LIMIT: tl.constexpr,
):
    """act(gate) * up in float32; or gpt-oss' (1 + up) * gate * sigmoid(SLOPE * gate), clamped."""
    if ACTIVATION == CLAMPED_SWISH:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        result = (1.0 + up) * gate / (1.0 + tl.exp(-SLOPE * gate))
    else:
        result = activated(gate, ACTIVATION) * up
    return result
