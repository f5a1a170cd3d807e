"""Packing: the writers of these tests against compressed-tensors' own, and back."""

import pytest
import torch

from quantised import KINDS, pack
from rayfin.actors.runner.quantized.config import read_formats
from rayfin.actors.runner.quantized.formats import mxfp4
from rayfin.kernels.grouped import Grouped, unpack_bits

FORMS = {  # of the library, whose formats these are
    "w4a16": 4,
    "w8a16": 8,
}


def random_codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, (rows, columns), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_packed_as_compressed_tensors_does(bits: int, dim: int) -> None:
    library = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = random_codes(16, 64, bits)
    theirs = library.pack_to_int32((codes - 2 ** (bits - 1)).to(torch.int8), bits, dim)
    ours = pack(codes, bits) if dim else pack(codes.T, bits).T
    assert torch.equal(ours, theirs)
    words = theirs if dim else theirs.T
    assert torch.equal(unpack_bits(words, bits).int(), (codes if dim else codes.T).int())


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_layer_of_each_format(kind: str) -> None:
    """The weight that a format reads is the one that its writer meant."""
    if kind.startswith("nf4"):
        pytest.skip("names with dots are renamed by the loader: test_checkpoints.py")
    tensors, weight = KINDS[kind].write(64, 96, torch.Generator().manual_seed(2))
    format = read_formats(KINDS[kind].config).of("model.layers.0.mlp.up_proj")
    grouped = format.grouped(64, 96, tensors)
    assert grouped.shape == (64, 96)
    torch.testing.assert_close(grouped.dense(), weight, atol=1e-6, rtol=1e-6)


def test_groups_that_do_not_fill_the_inputs() -> None:
    grouped = Grouped(
        torch.full((2, 5), 3, dtype=torch.uint8),
        torch.tensor([[1.0, 10.0, 100.0]]).expand(2, 3),
        2,
        4,
        torch.ones(2, 3, dtype=torch.int32),
    )
    assert grouped.dense()[0].tolist() == [2.0, 2.0, 20.0, 20.0, 200.0]


def test_mxfp4_numbers() -> None:
    blocks = torch.tensor([[[0x21, 0xF9, *[0] * 14]]], dtype=torch.uint8)
    numbers = mxfp4(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert numbers[0, :4].tolist() == [1.0, 2.0, -1.0, -12.0]  # times 2^1


def test_layers_with_settings_of_their_own() -> None:
    formats = read_formats(
        {
            **{"quant_method": "gptq", "bits": 4, "group_size": 128},
            "dynamic": {r"+:.*\.down_proj$": {"bits": 8, "group_size": 32}},
        }
    )
    assert (formats.of("model.layers.3.mlp.down_proj").bits, formats.default.bits) == (8, 4)
