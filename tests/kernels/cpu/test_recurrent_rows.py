"""The compiled recurrent layers against the reference and transformers' own functions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from rayfin.kernels import reference
from rayfin.kernels.cpu.kernels import Activation, CpuKernels
from rayfin.kernels.cpu.recurrent_rows import (
    DeltaLayer,
    GatedDelta,
    RecurrentKernels,
    RecurrentRows,
)

Row = tuple[int, bool]
"""The number of a row's tokens, and whether it has a past."""

Call = Callable[[RecurrentRows, slice, torch.Tensor], torch.Tensor]
"""Computes the tokens of a slice from and to states."""

some_rows = st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=5)


def rows_of(lengths: Sequence[int], past: Sequence[bool], each: Any = None) -> RecurrentRows:
    """Row r reads state 2 r and writes state 2 r + 1."""
    read = 2 * np.arange(len(lengths))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return RecurrentRows(starts, read, read + 1, np.array(past), each)


def check(rows: list[Row], states: torch.Tensor, run: Call, expect: Any) -> None:
    """Compares all rows with ``expect``, and their bits with each row's alone, token by token."""
    lengths = [length for length, _ in rows]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    kept = states.clone()
    out = run(rows_of(lengths, [past for _, past in rows]), slice(None), kept)
    assert torch.equal(kept[::2], states[::2]), "a state that is read has changed"
    behind = with_each_state(rows, states, run, out, kept)
    for row, (length, past) in enumerate(rows):
        part = slice(int(starts[row]), int(starts[row]) + length)
        before = states[2 * row] if past else torch.zeros_like(states[0])
        want, after = expect(part, before.double())
        torch.testing.assert_close(out[part].double(), want, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(kept[2 * row + 1].double(), after, rtol=2e-4, atol=2e-5)
        own = torch.stack([states[2 * row], states[2 * row]])
        for token in range(part.start, part.stop):
            one = slice(token, token + 1)
            has_past = past or token > part.start
            assert torch.equal(run(rows_of([1], [has_past]), one, own), out[one]), "other bits"
            own = own.flip(0).contiguous()
            assert token == part.stop - 1 or torch.equal(own[0], behind[token]), "another state"
        if length:
            assert torch.equal(own[0], kept[2 * row + 1]), "another state"


def with_each_state(
    rows: list[Row], states: torch.Tensor, run: Call, out: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """The states [T, ...] behind all tokens but the last of each row, which change nothing else."""
    lengths, count = [length for length, _ in rows], len(out)
    each, ends = len(states) + np.arange(count), np.cumsum(lengths)
    each[ends[ends > 0] - 1] = -1
    more = torch.cat([states, torch.zeros(count, *states.shape[1:])])
    again = run(rows_of(lengths, [past for _, past in rows], each), slice(None), more)
    assert torch.equal(again, out), "other bits where states are kept"
    assert torch.equal(more[: len(states)], kept), "other states where more are kept"
    return more[len(states) :]


def doubles(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.double() for tensor in tensors]


@settings(max_examples=15)
@given(
    rows=some_rows, channels=st.integers(1, 300), taps=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_short_conv(
    kernels: CpuKernels, rows: list[Row], channels: int, taps: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(sum(length for length, _ in rows), channels + 3)[:, 1 : channels + 1]
    weight, bias = torch.randn(taps, channels), torch.randn(channels)
    states = torch.randn(2 * len(rows), channels, taps)
    own = RecurrentKernels(kernels)

    def run(rows: RecurrentRows, part: slice, states: torch.Tensor) -> torch.Tensor:
        return own.short_conv(rows, x[part], weight, bias, states, Activation.NONE)

    check(rows, states, run, lambda part, state: reference.short_conv(
        *doubles(x[part], weight, bias), state))  # fmt: skip


@settings(max_examples=15)
@given(
    rows=some_rows,
    heads=st.sampled_from([(1, 1), (2, 4), (3, 3)]),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    normalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_delta_rule(
    kernels: CpuKernels,
    rows: list[Row],
    heads: tuple[int, int],
    dims: tuple[int, int],
    normalize: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tokens = sum(length for length, _ in rows)
    q, k = torch.randn(2, tokens, heads[0], dims[0]) / (1 if normalize else dims[0] ** 0.5)
    v, g = torch.randn(tokens, heads[1], dims[1]), -torch.rand(tokens, heads[1])
    beta, states = torch.rand(tokens, heads[1]), torch.randn(2 * len(rows), heads[1], *dims)
    own = RecurrentKernels(kernels)

    def run(rows: RecurrentRows, part: slice, states: torch.Tensor) -> torch.Tensor:
        inputs = (x[part] for x in (q, k, v, g, beta))
        return own.delta_rule(rows, *inputs, states, normalize=normalize)

    def expect(part: slice, state: torch.Tensor) -> Any:
        inputs = doubles(*(x[part] for x in (q, k, v, g, beta)))
        return reference.delta_rule(*inputs, state, normalize=normalize)

    check(rows, states, run, expect)


@settings(max_examples=15)
@given(
    rows=some_rows,
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    dims=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    has_skip=st.booleans(),
    seed=st.integers(0, 99),
)
def test_ssd(
    kernels: CpuKernels,
    rows: list[Row],
    heads: tuple[int, int],
    dims: tuple[int, int],
    has_skip: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    tokens = sum(length for length, _ in rows)
    x, dt = torch.randn(tokens, heads[0], dims[0]), torch.rand(tokens, heads[0])
    b, c = torch.randn(2, tokens, heads[1], dims[1])
    a, d = -torch.rand(heads[0]), torch.randn(heads[0]) if has_skip else None
    states = torch.randn(2 * len(rows), heads[0], *dims)
    own = RecurrentKernels(kernels)

    def run(rows: RecurrentRows, part: slice, states: torch.Tensor) -> torch.Tensor:
        return own.ssd(rows, x[part], dt[part], a, b[part], c[part], d, states)

    def expect(part: slice, state: torch.Tensor) -> Any:
        skip = None if d is None else d.double()
        return reference.ssd(*doubles(x[part], dt[part], a, b[part], c[part]), skip, state)

    check(rows, states, run, expect)


def test_nan_stays_in_its_row(kernels: CpuKernels) -> None:
    own, rows = RecurrentKernels(kernels), rows_of([2, 2, 2], [True, False, True])
    q, k, v = torch.randn(3, 6, 2, 8)
    g, beta, states = -torch.rand(6, 2), torch.rand(6, 2), torch.randn(6, 2, 8, 8)
    v[3, 0, 5] = float("nan")
    out = own.delta_rule(rows, q, k, v, g, beta, states, normalize=True)
    assert (~out.isfinite()).flatten(1).any(dim=1).nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("tokens", [1, 63, 130])
def test_transformers_delta_rule(kernels: CpuKernels, tokens: int) -> None:
    """The chunked form of transformers gives the same outputs and state."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, tokens, 2, 32)
    v = torch.cat([v, v.flip(1)], dim=2)
    g, beta = -torch.rand(1, tokens, 4), torch.rand(1, tokens, 4)
    state = torch.randn(1, 4, 32, 32)
    want, after = modeling_qwen3_5.torch_chunk_gated_delta_rule(
        *(q, k, v, g, beta),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    states = torch.cat([state, state])
    inputs = (x[0] for x in (q, k, v, g, beta))
    out = RecurrentKernels(kernels).delta_rule(
        rows_of([tokens], [True]), *inputs, states, normalize=True
    )
    torch.testing.assert_close(out, want[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(states[1:], after, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 40])
def test_transformers_ssd(kernels: CpuKernels, tokens: int) -> None:
    """The chunked form of transformers gives the same outputs and state."""
    torch.manual_seed(0)
    x, dt = torch.randn(1, tokens, 4, 16), torch.rand(1, tokens, 4)
    b, c = torch.randn(2, 1, tokens, 2, 24)
    a, d, state = -torch.rand(4), torch.randn(4), torch.randn(1, 4, 16, 24)
    want, after = modeling_mamba2.mamba2_chunk_scan(
        *(x, dt, a, b, c), chunk_size=16, D=d, initial_states=state, return_final_states=True
    )
    states = torch.cat([state, state])
    inputs = (x[0], dt[0], a, b[0], c[0], d)
    out = RecurrentKernels(kernels).ssd(rows_of([tokens], [True]), *inputs, states)
    torch.testing.assert_close(out, want[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(states[1:], after, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (5, 48), (16, 16)])
def test_delta_rule_of_whole_heads(kernels: CpuKernels, key_dim: int, value_dim: int) -> None:
    """Rows of one token among others; of the largest heads states are written past the caches."""
    torch.manual_seed(0)
    lengths = [1, 1, 0, 1, 5, 1, 1, 2, 1, 1]
    past = [True, True, True, False, True, True, True, False, True, True]
    tokens = sum(lengths)
    q, k = torch.randn(2, tokens, 2, key_dim)
    v, g = torch.randn(tokens, 4, value_dim), -torch.rand(tokens, 4)
    beta, states = torch.rand(tokens, 4), torch.randn(20, 4, key_dim, value_dim)
    own = RecurrentKernels(kernels)

    def run(rows: RecurrentRows, part: slice, states: torch.Tensor) -> torch.Tensor:
        return own.delta_rule(rows, *(x[part] for x in (q, k, v, g, beta)), states, normalize=True)

    def expect(part: slice, state: torch.Tensor) -> Any:
        inputs = doubles(*(x[part] for x in (q, k, v, g, beta)))
        return reference.delta_rule(*inputs, state, normalize=True)

    check(list(zip(lengths, past, strict=True)), states, run, expect)


def gated_delta(key_dim: int, value_dim: int, taps: int, bias: bool) -> GatedDelta:
    """A layer of two key and four value heads."""
    channels = 2 * 2 * key_dim + 4 * value_dim
    return GatedDelta(
        conv=torch.randn(taps, channels),
        conv_bias=torch.randn(channels) if bias else None,
        activation=Activation.SILU,
        rate=-torch.rand(4),
        shift=torch.randn(4),
        norm=torch.randn(value_dim),
        key_heads=2,
        value_heads=4,
        key_dim=key_dim,
        value_dim=value_dim,
        eps=1e-6,
        beta_scale=2.0,
    )


@pytest.mark.parametrize(("key_dim", "value_dim", "taps"), [(16, 32, 4), (5, 7, 3)])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_delta(
    kernels: CpuKernels, key_dim: int, value_dim: int, taps: int, bias: bool
) -> None:
    """One call gives what its parts give, and each row's bits do not depend on the others."""
    torch.manual_seed(0)
    layer = gated_delta(key_dim, value_dim, taps, bias)
    channels = layer.conv.shape[1]
    lengths, past = [1, 37, 1, 3], [True, False, True, True]
    x = torch.randn(sum(lengths), layer.columns + 5)[:, 2 : layer.columns + 2]
    states = torch.randn(8, channels, taps), torch.randn(8, 4, key_dim, value_dim)
    kept, rows, own = (
        [one.clone() for one in states],
        rows_of(lengths, past),
        RecurrentKernels(kernels),
    )
    out = own.gated_delta(rows, x, layer, *kept)

    kinds = [channels, 4 * value_dim, 4, 4]
    mixed, z, b, a = x.split(kinds, dim=1)
    parts = [one.clone() for one in states]
    mixed = own.short_conv(rows, mixed, layer.conv, layer.conv_bias, parts[0], layer.activation)
    q, k, v = mixed.split([2 * key_dim, 2 * key_dim, 4 * value_dim], dim=1)
    g, beta = layer.rate * functional.softplus(a + layer.shift), 2.0 * b.sigmoid()
    heads = (q.unflatten(1, (2, -1)), k.unflatten(1, (2, -1)), v.unflatten(1, (4, -1)))
    y = own.delta_rule(rows, *heads, g, beta, parts[1], normalize=True)
    y = functional.rms_norm(y, [value_dim], layer.norm, 1e-6)
    want = (y * functional.silu(z.unflatten(1, (4, -1)))).flatten(1)
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    for one, other in zip(kept, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    alone = [one.clone() for one in states]  # the second row, token by token
    for at in range(37):
        line = x[1 + at : 2 + at]
        row = RecurrentRows(*(np.array(n) for n in ([0, 1], [2 + at % 2], [3 - at % 2], [at > 0])))
        assert torch.equal(own.gated_delta(row, line, layer, *alone), out[1 + at : 2 + at])
    assert all(torch.equal(one[3], other[3]) for one, other in zip(alone, kept, strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_delta_layer(kernels: CpuKernels, bias: bool) -> None:
    """One call gives what its parts give, to the last bit."""
    torch.manual_seed(0)
    rule, own = gated_delta(16, 24, 4, False), RecurrentKernels(kernels)
    sizes = {"into": (rule.columns, 32), "out": (32, 96), "gate": (56, 32), "up": (56, 32)}
    weights = {name: torch.randn(size) / 6 for name, size in sizes.items()}
    layer = DeltaLayer(
        rule=rule,
        rule_norm=torch.randn(32),
        rule_eps=1e-6,
        into=kernels.pack([weights["into"]]),
        out=kernels.pack([weights["out"]]),
        mlp_norm=torch.randn(32),
        mlp_eps=1e-5,
        gate_up=kernels.pack([weights["gate"], weights["up"]], paired=True),
        down=kernels.pack([torch.randn(32, 56) / 6]),
        gate_up_bias=torch.randn(112) if bias else None,
        down_bias=torch.randn(32) if bias else None,
        activation=Activation.SILU,
    )
    lengths, past = [1, 20, 1, 3], [True, False, True, True]
    rows, x = rows_of(lengths, past), torch.randn(sum(lengths), 32)
    states = torch.randn(8, rule.conv.shape[1], 4), torch.randn(8, 4, 16, 24)
    parts, kept = ([one.clone() for one in states] for _ in range(2))

    lines = kernels.matmul(kernels.rms_norm(x, layer.rule_norm, 1e-6), layer.into)
    y = own.gated_delta(rows, lines, rule, *parts)
    want = kernels.matmul(y, layer.out, residual=x)
    normed = kernels.rms_norm(want, layer.mlp_norm, 1e-5)
    inner = kernels.matmul(
        normed, layer.gate_up, bias=layer.gate_up_bias, activation=Activation.SILU
    )
    want = kernels.matmul(inner, layer.down, bias=layer.down_bias, residual=want)

    own.delta_layer(rows, x, layer, *kept)
    assert torch.equal(x, want)
    assert all(torch.equal(one, other) for one, other in zip(kept, parts, strict=True))
