"""A model that was given new weights has the bytes of one that was loaded with them."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rank_groups import Group
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.loading import LoadedModel, load
from rayfin.actors.runner.weights import refill
from rayfin.actors.runner.weights.check import check_finite
from rayfin.actors.runner.weights.refill import Refiller
from rayfin.actors.weights.sources import folder_version
from rayfin.actors.weights.store import WeightStore
from rayfin.actors.weights.tensors import tensors_version
from rayfin.kernels.cpu.kernels import Matrix, try_kernels
from tiers import few

DENSE = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "gemma2", "phi3", "gpt2", "gpt_neox"]
MORE = ["olmo2", "granite", "cohere", "glm4", "opt", "olmo3", "bloom", "codegen", "falcon"]
IN_PLACE = [*DENSE, *MORE, "gpt_neo", "llama4_text"]
ANEW = [
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "deepseek_v32", "qwen2_moe", "glm4_moe"),
    *("olmoe", "qwen3_next", "qwen3_5_text", "lfm2", "mamba", "mamba2"),
    *("deepseek_v2", "phimoe", "hy_v4", "glm_moe_dsa"),
]
CASES = [(family, how) for how in (None, "int8", "int4") for family in IN_PLACE]

pytestmark = pytest.mark.skipif(try_kernels(1) is None, reason="the CPU kernels are not built")


def engine_args(folder: Path, **settings: Any) -> EngineArgs:
    return EngineArgs(model=str(folder), device="cpu", threads=1, **settings)


def numbers(value: Any, seen: set[int] | None = None) -> Iterator[np.ndarray[Any, Any]]:
    """All numbers that a model computes with, by walking through its objects."""
    seen = set() if seen is None else seen
    if isinstance(value, list | tuple):
        for own in value:
            yield from numbers(own, seen)
        return
    if id(value) in seen:
        return
    if isinstance(value, Matrix):
        seen.add(id(value))
        yield from value.parts()
    elif isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield value.detach().float().numpy()
    elif isinstance(value, nn.Module):
        seen.add(id(value))
        for held in (value._parameters, value._buffers, value._modules):
            yield from numbers(list(held.values()), seen)
        plain = [own for name, own in vars(value).items() if name != "paged_layer"]
        yield from numbers([own for own in plain if isinstance(own, Matrix | list | tuple)], seen)
        yield from numbers([own for own in plain if isinstance(own, torch.Tensor)], seen)


def content(loaded: LoadedModel) -> list[np.ndarray[Any, Any]]:
    model: Any = loaded.decoder
    if not isinstance(model, CpuDecoder):
        return list(numbers(model.transformer))
    packed = model.packed
    layers = [[getattr(own, name) for name in own.__dataclass_fields__] for own in packed.layers]
    ends = [packed.embedding, packed.head, packed.final_norm, packed.head_bias]
    scale = np.array([packed.shape.embedding_scale])
    return [*numbers([*layers, *ends]), scale]


def same(one: LoadedModel, other: LoadedModel) -> bool:
    pairs = list(zip(content(one), content(other), strict=True))
    assert len(pairs) > 10
    return all(np.array_equal(mine, theirs, equal_nan=True) for mine, theirs in pairs)


def test_a_walk_sees_all_weights(tiny_models: ModuleType, tmp_path: Path) -> None:
    tiny_models.make_tiny_model("gpt2", tmp_path / "one")
    tiny_models.make_tiny_model("gpt2", tmp_path / "two", seed=1)
    one, two = (load(engine_args(tmp_path / name)) for name in ("one", "two"))
    equal = [np.array_equal(*pair) for pair in zip(content(one), content(two), strict=True)]
    assert equal.count(False) > 35  # norms are ones, and some blocks empty


@pytest.mark.parametrize(("family", "quantization"), few(CASES, 8))
def test_in_place(
    family: str, quantization: str | None, tiny_models: ModuleType, tmp_path: Path
) -> None:
    """By a folder, then by tensors in 16 bits, then in 32 bits again."""
    tied = {"tie_word_embeddings": True} if family in ("qwen3", "gemma2") else {}
    for seed in range(3):
        tiny_models.make_tiny_model(family, tmp_path / str(seed), seed=seed, **tied)
    args = engine_args(tmp_path / "0", quantization=quantization)
    loaded, store = load(args), WeightStore(tmp_path / "store" / "0")
    first = folder_version(str(tmp_path / "1"))
    assert Refiller(loaded, args).check(first).in_place
    Refiller(loaded, args).refill(first)
    assert same(loaded, load(engine_args(tmp_path / "1", quantization=quantization)))
    tensors = load_file(tmp_path / "2" / "model.safetensors")
    narrow = {name: own.bfloat16() for name, own in tensors.items()}
    save_file(narrow, tmp_path / "2" / "model.safetensors", {"format": "pt"})
    second = tensors_version(store, {f"module.{name}": own for name, own in narrow.items()}, "two")
    refiller = Refiller(loaded, args)
    assert refiller.check(second).in_place
    refiller.refill(second)
    fresh = load(engine_args(tmp_path / "2", quantization=quantization))
    assert same(loaded, fresh)
    assert same(load(args, None, second), fresh)  # as a successor does
    Refiller(loaded, args).refill(first)
    assert same(loaded, load(engine_args(tmp_path / "1", quantization=quantization)))


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_ranks_in_place(tensor: int, stages: int, tiny_models: ModuleType, tmp_path: Path) -> None:
    """Each rank takes its share of a version."""
    for seed in range(2):
        tiny_models.make_tiny_model("qwen3", tmp_path / str(seed), seed=seed)
    settings = {"num_pages": 64, "max_decoding_batch": 4}
    group, fresh = (
        Group(engine_args(tmp_path / str(seed), **settings), tensor, stages) for seed in range(2)
    )
    try:
        version = folder_version(str(tmp_path / "1"))
        pairs = list(zip(group.runners, fresh.runners, strict=True))
        assert not all(same(one.loaded, other.loaded) for one, other in pairs)
        votes = group._all(lambda runner: runner.vote(version), group.runners)
        assert all(vote.in_place for vote in votes)
        group._all(lambda runner: runner.turn(group.epoch + 1, version), group.runners)
        assert all(same(one.loaded, other.loaded) for one, other in pairs)
    finally:
        group.close()
        fresh.close()


@pytest.mark.parametrize("family", few(ANEW, 4))
def test_by_new_runners(family: str, tiny_models: ModuleType, tmp_path: Path) -> None:
    for seed in range(2):
        tiny_models.make_tiny_model(family, tmp_path / str(seed), seed=seed)
    args = engine_args(tmp_path / "0")
    loaded, store = load(args), WeightStore(tmp_path / "store" / "0")
    tensors = load_file(tmp_path / "1" / "model.safetensors")
    version = tensors_version(store, tensors)
    assert not Refiller(loaded, args).check(version).in_place
    assert same(load(args, None, version), load(engine_args(tmp_path / "1")))


def test_what_does_not_fit(tiny_models: ModuleType, tmp_path: Path) -> None:
    tiny_models.make_tiny_model("qwen3", tmp_path / "0", tie_word_embeddings=True)
    args = engine_args(tmp_path / "0")
    loaded, store = load(args), WeightStore(tmp_path / "store" / "0")
    good = load_file(tmp_path / "0" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    before = [own.copy() for own in content(loaded)]

    def refused(tensors: dict[str, torch.Tensor], word: str) -> None:
        with pytest.raises(InvalidRequest, match=word) as error:
            Refiller(loaded, args).check(tensors_version(store, tensors))
        assert error.value.param

    refused({key: own for key, own in good.items() if key != name}, "lack 1 .*up_proj")
    refused({**good, "model.more": torch.zeros(1)}, "no model.more")
    refused({**good, name: good[name].T.contiguous()}, "up_proj.weight is .48|32")
    refused({**good, name: good[name] * float("nan")}, "up_proj.weight has numbers")
    refused({**good, name: good[name].int()}, "up_proj.weight is int32")
    refused({**good, "lm_head.weight": good["model.embed_tokens.weight"] + 1}, "tied")
    refused({**good, f"module.{name}": good[name]}, "twice")
    both = good | {"lm_head.weight": good["model.embed_tokens.weight"]}
    Refiller(loaded, args).check(tensors_version(store, both))
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes((tmp_path / "0" / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Refiller(loaded, args).check(folder_version(str(torn)))
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="pickles are never read"):
        folder_version(str(tmp_path / "pickles"))
    (tmp_path / "pickles" / "model.safetensors").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="a link out"):
        folder_version(str(tmp_path / "pickles"))
    assert all(map(np.array_equal, before, content(loaded)))


def test_growth_needs_memory(
    tiny_models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that 16 bits hold take what those before took, in whatever dtype they come."""
    tiny_models.make_tiny_model("llama", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    narrow = {name: own.bfloat16() for name, own in load_file(path).items()}
    save_file(narrow, path, {"format": "pt"})
    store, args = WeightStore(tmp_path / "a" / "b"), engine_args(tmp_path / "model")
    loaded = load(args)
    assert isinstance(loaded.decoder, CpuDecoder) and not loaded.decoder.packed.wide_numbers
    monkeypatch.setattr(refill, "free_bytes", lambda: 1)
    widened = {name: own.float() for name, own in narrow.items()}
    Refiller(loaded, args).check(tensors_version(store, widened))
    wide = tensors_version(store, {name: own * 1.001 for name, own in widened.items()})
    with pytest.raises(InvalidRequest, match="dtype=bfloat16 rounds them") as caught:
        Refiller(loaded, args).check(wide)
    assert caught.value.param == "dtype"
    Refiller(loaded, args).refill(wide)
    assert loaded.decoder.packed.wide_numbers
    Refiller(loaded, args).check(wide)  # it grows no more


def test_codes_of_8_bits(tmp_path: Path) -> None:
    """torch does not say itself whether those of FP8 are numbers."""
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        save_file({"x": torch.ones(9).to(kind)}, tmp_path / "x.safetensors")
        check_finite([tmp_path / "x.safetensors"])
        save_file({"x": torch.full((9,), torch.nan).to(kind)}, tmp_path / "x.safetensors")
        with pytest.raises(InvalidRequest, match="x has numbers that are none"):
            check_finite([tmp_path / "x.safetensors"])


def test_a_successor_over_packed_weights_that_cannot_be_refilled(
    tiny_models: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(2):
        tiny_models.make_tiny_model("llama", tmp_path / str(seed), seed=seed)
    args = engine_args(tmp_path / "0", weights_cache=str(tmp_path / "cache"))
    load(args)
    version, fresh = folder_version(str(tmp_path / "1")), load(engine_args(tmp_path / "1"))
    assert same(load(args, None, version), fresh)
    monkeypatch.setattr(refill, "can_refill", lambda loaded, args: False)
    assert same(load(args, None, version), fresh)
