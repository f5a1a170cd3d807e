"""Blocks of GGUF files: the numbers that the gguf package reads in them."""

from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner.quantized.gguf_blocks import BLOCKS, Gguf
from rayfin.kernels.cpu.codes import pack_codes
from rayfin.kernels.cpu.kernels import CpuKernels

gguf = pytest.importorskip("gguf")


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> Any:
    """Bytes [outputs, bytes] of a type, whose halves are small numbers."""
    block, random = BLOCKS[kind], np.random.default_rng(seed)
    octets = random.integers(0, 256, (outputs, inputs // block.inputs, block.bytes), np.uint8)
    halves = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}.get(kind, (0,))
    if kind in ("q4_1", "q5_1", "q4_k", "q5_k"):
        halves = (0, 2)
    for at in halves:
        numbers = random.normal(0, 0.01, octets.shape[:2]).astype(np.float16)
        octets[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return octets.reshape(outputs, -1)


def layer(kind: str) -> Gguf:
    return Gguf(8, None, "gguf").as_stored(["bias", kind])


@pytest.mark.parametrize("kind", BLOCKS)
def test_numbers(kind: str) -> None:
    type_ = gguf.GGMLQuantizationType[kind.upper()]
    octets = random_blocks(kind, 7, 512)
    expected = torch.from_numpy(gguf.quants.dequantize(octets, type_).reshape(7, 512))
    weight = layer(kind).grouped(7, 512, {kind: torch.from_numpy(octets)})
    assert torch.equal(weight.dense(), expected)
    assert (BLOCKS[kind].inputs, BLOCKS[kind].bytes) == gguf.GGML_QUANT_SIZES[type_]


BITS = {
    **dict.fromkeys(("q4_0", "iq4_nl"), (4.5, 4.5)),
    **dict.fromkeys(("q8_0",), (8.5, 8.5)),
    **{"q4_1": (5, 5), "q5_0": (8.5, 6.5), "q5_1": (9, 7), "q6_k": (8.5625, 6.5625)},
    **{"q4_k": (4.625, 4.625), "q5_k": (8.625, 6.625), "iq4_xs": (4.3125, 4.3125)},
    **{"q2_k": (5.125, 5.125), "q3_k": (4.5625, 4.5625)},
}
"""Of a weight in memory, with exact and with rounded rows."""


@pytest.mark.parametrize("kind", BLOCKS)
def test_bits_in_memory(kind: str) -> None:
    octets = torch.from_numpy(random_blocks(kind, 40, 512))
    weight, kernels = layer(kind).grouped(40, 512, {kind: octets}), CpuKernels(1)
    for rounds, bits in zip((False, True), BITS[kind], strict=True):
        matrix = pack_codes(kernels, weight, round_rows=rounds)
        assert matrix is not None and matrix.rounds_rows == rounds
        assert matrix.bytes * 8 / (40 * 512) == bits
        assert torch.equal(matrix.rows(torch.arange(40)), weight.dense())


@pytest.mark.parametrize("kind", BLOCKS)
def test_they_stay_codes(kind: str) -> None:
    """The kernels read all of them, to the last bit."""
    octets = torch.from_numpy(random_blocks(kind, 40, 512))
    weight = layer(kind).grouped(40, 512, {kind: octets})
    kernels = CpuKernels(1)
    matrix = pack_codes(kernels, weight)
    assert matrix is not None and matrix.codes.bits == BLOCKS[kind].bits
    assert torch.equal(matrix.rows(torch.arange(40)), weight.dense())
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(0))
    expected = (x.double() @ weight.dense().double().T).float()
    torch.testing.assert_close(kernels.matmul(x, matrix), expected, rtol=1e-4, atol=1e-4)


def test_sizes() -> None:
    slots = layer("q4_k").slots(8, 512, {})
    assert list(slots) == ["q4_k"] and slots["q4_k"].shape == (8, 288)
    with pytest.raises(InvalidConfig, match="500 inputs are not whole blocks of 256"):
        layer("q4_k").slots(8, 500, {})
    assert layer("weight").label == "GGUF blocks" and layer("q6_k").label == "GGUF Q6_K"
