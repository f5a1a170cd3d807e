"""Experts that transformers would merge stay apart: the same numbers, and no copy of all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from rayfin.actors.runner.models.mapped_weights import NarrowWeight, hold_narrow, narrow_loads
from rayfin.actors.runner.models.unmerged_experts import PARTS, Apart, Parts, kept_apart

Make = Callable[..., Any]
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3")


def load(folder: Path, *, wanted: bool) -> Any:
    with narrow_loads(wanted) as names:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    hold_narrow(model.eval().requires_grad_(False), names)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_numbers_of_the_merged_experts(family: str, tiny_model: Make, tmp_path: Path) -> None:
    source = AutoModelForCausalLM.from_pretrained(tiny_model(family).folder, dtype=torch.bfloat16)
    source.save_pretrained(tmp_path)
    merged, model = load(tmp_path, wanted=False), load(tmp_path, wanted=True)
    apart = 0
    for name, expected in merged.named_parameters():
        own = model.get_parameter(name)
        if not (isinstance(own, NarrowWeight) and isinstance(own._stored, Parts)):
            continue
        apart += 1
        assert own.shape == expected.shape and own.dtype == torch.float32
        assert torch.equal(own.wide(), expected)
        for index in (0, -1, torch.tensor(1), slice(1, 3), torch.tensor([2, 0])):
            assert torch.equal(own[index], expected[index]), index
    assert apart >= 2
    tokens = torch.tensor([[5, 9, 33, 7]])
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, merged(tokens).logits)


def merge(lists: list[list[torch.Tensor]], operations: list[Any]) -> Any:
    patterns = [f"experts.*.{index}" for index in range(len(lists))]
    given: Any = dict(zip(patterns, lists, strict=True))
    for operation in operations:
        given = operation.convert(given, source_patterns=patterns, target_patterns=["experts.all"])
    return given["experts.all"]


def operations(count: int) -> list[Any]:
    both = [MergeModulelist(dim=0), Concatenate(dim=1)]
    return both if count > 1 else both[:1]


@pytest.mark.parametrize("sizes", [[6], [4, 4], [4, 2]])
def test_one_parameter_stands_for_all(sizes: list[int]) -> None:
    lists = [[torch.randn(size, 5).bfloat16() for _ in range(3)] for size in sizes]
    expected = merge([list(one) for one in lists], operations(len(sizes)))
    found = merge(lists, [Apart(operations(len(sizes)), (torch.bfloat16,))])
    assert found.shape == expected.shape and found.untyped_storage().nbytes() <= 8
    parts = getattr(found, PARTS)
    assert torch.equal(parts.merged(), expected) and torch.equal(parts[1], expected[1])


def test_others_are_merged() -> None:
    """Float32 numbers; experts of several types, whose merge has the widest."""
    wide = [[torch.randn(4, 5) for _ in range(3)] for _ in range(2)]
    mixed = [[torch.randn(4, 5).bfloat16(), torch.randn(4, 5).half()]]
    for lists in (wide, mixed):
        expected = merge([list(one) for one in lists], operations(len(lists)))
        found = merge(lists, [Apart(operations(len(lists)), (torch.bfloat16, torch.float16))])
        assert not hasattr(found, PARTS) and torch.equal(found, expected)


def test_which_conversions_merge() -> None:
    def made(*kinds: Any) -> WeightConverter:
        return WeightConverter("experts.*.w.weight", "experts.w", list(kinds))

    merges = made(MergeModulelist(dim=0))
    others = [made(MergeModulelist(dim=1)), made(MergeModulelist(dim=0), Transpose(1, 2))]
    mapping = kept_apart([merges, *others], (torch.bfloat16,))
    assert type(mapping[0].operations[0]) is Apart and mapping[1:] == others
    assert type(merges.operations[0]) is MergeModulelist, "transformers' own is as it was"
