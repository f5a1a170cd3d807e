"""Shares of layers in codes on a GPU's kernels; without a GPU in the interpreter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quantised import KINDS, QuantisedModel, mxfp4_model
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.models.paged_model import ATTENTION
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.parallel.shard_codes import OrderedInputs
from rayfin.actors.runner.parallel.shard_weights import load_share
from rayfin.actors.runner.quantized.loader import dequantize
from tiers import few

pytest.importorskip("triton")
from rayfin.actors.runner.gpu.quant_linear import TritonLinear, pack_quantized, round_linears

Make = Callable[..., Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RANKS = 2


def shares(folder: Path, engine_args: Make, **changes: Any) -> list[Any]:
    """Both ranks' models, which are not connected."""
    args = engine_args(folder, **changes)
    return [
        load_share(
            *(args, load_config(args), DEVICE, ATTENTION),
            ProcessGroups(ParallelRank(rank, RANKS, 1, ("", 1), ""), DEVICE),
            keep_quantized=True,
        )
        for rank in range(RANKS)
    ]


def cut(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(RANKS, dim=-1)[rank]


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_every_format(kind: str, tmp_path: Path, engine_args: Make) -> None:
    """Outputs of ranks beside one another, and sums of their inputs, are those of the weights."""
    written = QuantisedModel(kind, "llama", tmp_path)
    models = shares(written.folder, engine_args)
    for model in models:
        assert pack_quantized(model) > 0
        assert sum(isinstance(one, TritonLinear) for one in model.modules()) == 14
    plain = written.model.model.layers[1].to(DEVICE)
    layers = [model.model.layers[1] for model in models]
    x = torch.randn(3, 64, device=DEVICE)
    for wanted, parts in (
        (plain.self_attn.v_proj(x), [layer.self_attn.v_proj(x) for layer in layers]),
        (plain.mlp.up_proj(x), [layer.mlp.up_proj(x) for layer in layers]),
    ):
        torch.testing.assert_close(torch.cat(parts, dim=-1), wanted, rtol=1e-4, atol=1e-4)
    for name, owner, width in (("o_proj", "self_attn", 64), ("down_proj", "mlp", 96)):
        x = torch.randn(3, width, device=DEVICE)
        wanted = plain.get_submodule(f"{owner}.{name}")(x)
        found = torch.zeros_like(wanted)
        for rank, layer in enumerate(layers):
            shard = layer.get_submodule(f"{owner}.{name}.shard")
            ordered = isinstance(shard, OrderedInputs)
            assert ordered == ("desc_act" in kind or "actorder" in kind)
            found += shard.shard(x[:, shard._places]) if ordered else shard(cut(x, rank))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "family"), [("gptq desc_act", "qwen3_moe"), ("mxfp4", "gpt_oss")])
def test_experts_made_plain_are_on_the_device(
    kind: str, family: str, tmp_path: Path, engine_args: Make
) -> None:
    is_mxfp4 = kind == "mxfp4"
    written = mxfp4_model(tmp_path) if is_mxfp4 else QuantisedModel(kind, family, tmp_path)
    models = shares(written.folder, engine_args)
    x = torch.randn(5, 64, device=DEVICE)
    chosen = torch.tensor([[0, 3], [3, 1], [1, 0], [3, 0], [0, 1]], device=DEVICE)
    weights = torch.rand(5, 2, device=DEVICE)
    wanted = written.model.model.layers[1].mlp.experts.to(DEVICE)(x, chosen, weights)
    found = torch.zeros_like(wanted)
    for model in models:
        dequantize(model)
        (experts,) = (
            one
            for name, one in model.model.layers[1].named_modules()
            if "down_proj" in one._parameters and "experts" in name
        )
        assert {own.device.type for own in experts.parameters()} == {DEVICE.type}
        found += experts(x, chosen, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", few([4, 8], 1))
def test_plain_weights_are_rounded_but_for_the_head(
    bits: int, tiny_model: Make, engine_args: Make
) -> None:
    for model in shares(tiny_model("llama").folder, engine_args):
        assert round_linears(model, bits) == 21  # of three layers
        assert type(model.lm_head.shard) is nn.Linear
