"""The kernels between a layer's matrix products against the reference."""

from collections.abc import Callable

import pytest
import torch

from rayfin.kernels import reference

pytest.importorskip("triton")
from rayfin.kernels.attention.triton_backend import TritonAttention
from rayfin.kernels.triton import layers

Close = Callable[[torch.Tensor, torch.Tensor], None]
EPS = 1e-5
FP8 = torch.float8_e4m3fn


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("out_norm", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_add_and_norm(
    device: torch.device, close: Close, dtype: torch.dtype, out_norm: bool, norm: bool
) -> None:
    x, hidden = normal(3, 40, dtype=dtype), normal(3, 40, dtype=dtype, seed=1)
    weight, out_weight = normal(40, seed=2), normal(40, seed=3)
    stream = hidden.clone().to(device)
    out = layers.add_and_norm(
        x.to(device),
        stream,
        weight.to(device) if norm else None,
        EPS,
        out_weight=out_weight.to(device) if out_norm else None,
        residual_scale=0.5,
    )
    added = reference.rms_norm(x, out_weight, EPS) if out_norm else x
    wanted = (hidden.float() + 0.5 * added.float()).to(dtype)
    close(stream, wanted)
    close(out, reference.rms_norm(wanted, weight, EPS) if norm else wanted)


def test_norm_of_a_part(device: torch.device, close: Close) -> None:
    wide, weight = normal(3, 64), normal(24, seed=1)
    out = layers.rms_norm(wide.to(device)[:, 8:32], weight.to(device), EPS)
    close(out, reference.rms_norm(wide[:, 8:32], weight, EPS))


def tables(positions: int, half: int, theta: float = 100.0) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(positions).double()[:, None] * theta ** (-torch.arange(half) / half)
    return angles.cos().float(), angles.sin().float()


def end_of(stream: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> layers.Behind:
    return layers.Behind(stream.to(device), 2.0, None if bias is None else bias.to(device))


def ended(
    product: torch.Tensor, stream: torch.Tensor, behind: layers.Behind | None
) -> torch.Tensor:
    """What is left of a product, in float32."""
    if behind is None:
        return product.float()
    factor = behind.gain / (stream.float().square().mean(1, keepdim=True) + EPS).sqrt()
    return product.float() * factor + (0.0 if behind.bias is None else behind.bias.cpu().float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "norms, rotary_dim, value_dim, end",
    [
        ("", 12, 12, ""),
        ("", 12, 12, "divide and add"),
        ("qk", 12, 12, "divide"),
        ("k", 8, 20, "divide and add"),
        ("q", 12, 8, ""),
    ],
)
def test_turn_and_write(
    device: torch.device,
    close: Close,
    dtype: torch.dtype,
    norms: str,
    rotary_dim: int,
    value_dim: int,
    end: str,
) -> None:
    """And the end of the product before it."""
    heads, kv_heads, key_dim = 6, 2, 12
    tokens = 3
    qkv = normal(tokens, heads * key_dim + kv_heads * (key_dim + value_dim), dtype=dtype)
    positions, slots = torch.tensor([0, 7, 31]), torch.tensor([5, -1, 2])
    query_norm = normal(key_dim, seed=1) if "q" in norms else None
    key_norm = normal(key_dim, seed=2) if "k" in norms else None
    k_pages = torch.zeros(2, 4, kv_heads, key_dim, dtype=dtype, device=device)
    v_pages = torch.zeros(2, 4, kv_heads, value_dim, dtype=dtype, device=device)
    cos, sin = tables(32, rotary_dim // 2)
    stream, bias = normal(tokens, 40, seed=3).to(dtype), normal(qkv.shape[1], seed=4).to(dtype)
    behind = end_of(stream, bias if "add" in end else None, device) if end else None
    query = layers.rope_and_write_kv(
        qkv.to(device),
        None if query_norm is None else query_norm.to(device),
        None if key_norm is None else key_norm.to(device),
        (cos.to(device), sin.to(device)),
        positions.to(device),
        slots.to(device),
        k_pages,
        v_pages,
        heads=heads,
        eps=EPS,
        behind=behind,
    )
    qkv = ended(qkv, stream, behind)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x if weight is None else reference.rms_norm(x.float(), weight, EPS)
        front = reference.rotary(x[..., :rotary_dim].float(), positions, 100.0)
        return torch.cat([front, x[..., rotary_dim:].float()], dim=-1)

    q, k, v = qkv.split([heads * key_dim, kv_heads * key_dim, kv_heads * value_dim], dim=1)
    close(query, turned(q.view(tokens, heads, key_dim), query_norm))
    wanted_k, wanted_v = torch.zeros_like(k_pages.cpu()), torch.zeros_like(v_pages.cpu())
    key = turned(k.view(tokens, kv_heads, key_dim), key_norm).to(dtype)
    value = v.view(tokens, kv_heads, value_dim)
    written = slots >= 0
    reference.write_kv(key[written], value[written], wanted_k, wanted_v, slots[written])
    close(k_pages, wanted_k)
    close(v_pages, wanted_v)


def test_fp8_pages_hold_the_rounded_numbers_of_float32_pages(device: torch.device) -> None:
    """Among them all that fp8 has, all ties, what is too large, infinities and a NaN."""
    if FP8 not in TritonAttention(device).page_types:
        pytest.skip("this GPU does not convert fp8")
    tokens, heads, kv_heads, dim = 40, 1, 2, 12
    own = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    ties = (own[:126] + own[1:127]) / 2
    large = torch.tensor([463.9, 464.1, 1e9, -1e9, float("inf"), -float("inf")])
    numbers = torch.cat([own, ties, -ties, large])
    small = normal(tokens * kv_heads * dim - len(numbers), seed=1)
    small *= torch.exp2(torch.arange(len(small)) % 20 - 12)
    values = torch.cat([numbers, small]).view(tokens, -1)
    qkv = torch.cat([normal(tokens, (heads + kv_heads) * dim), values], dim=1)
    pages = {}
    for dtype in (torch.float32, FP8):
        shape = (tokens // 4, 4, kv_heads, dim)
        pages[dtype] = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)]
        layers.rope_and_write_kv(
            qkv.to(device),
            None,
            (50 * normal(dim, seed=2)).to(device),
            tuple(table.to(device) for table in tables(tokens, dim // 2)),
            torch.arange(tokens, device=device),
            torch.arange(tokens, device=device).flip(0),
            *pages[dtype],
            heads=heads,
            eps=EPS,
        )
    for exact, rounded in zip(pages[torch.float32], pages[FP8], strict=True):
        wanted = reference.e4m3(exact.cpu())
        torch.testing.assert_close(rounded.float().cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("activation", "end"),
    [("silu", ""), ("silu", "divide"), ("gelu_tanh", "divide and add"), ("gelu", "")],
)
def test_gate(
    device: torch.device, close: Close, dtype: torch.dtype, activation: str, end: str
) -> None:
    """Behind a product that has ended, and of one that has not."""
    x, stream = 4 * normal(3, 2 * 1100, dtype=dtype), normal(3, 40, dtype=dtype, seed=1)
    bias = normal(2 * 1100, dtype=dtype, seed=2) if "add" in end else None
    behind = end_of(stream, bias, device) if end else None
    wanted = {
        "silu": reference.silu_mul,
        "gelu_tanh": reference.gelu_mul,
        "gelu": lambda gate_up: reference.gelu_mul(gate_up, tanh=False),
    }[activation](ended(x, stream, behind))
    close(layers.gate(x.to(device), activation, eps=EPS, behind=behind), wanted)
