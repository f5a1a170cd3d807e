"""Samples where rows may not take every token, on every path, against the obvious form."""

from functools import partial

import pytest
import torch

from rayfin.kernels import reference
from rayfin.kernels.cpu.kernels import try_kernels
from rayfin.kernels.sampling.filters import allow_bits
from rayfin.kernels.sampling.sample import sample
from rayfin.kernels.sampling.select import SampleTokens, sample_allowed, sample_on_cpu
from rayfin.kernels.shapes import SamplingRows, TokenBits

VOCABULARY = 70


def paths() -> list[SampleTokens]:
    compiled = try_kernels(1)
    torch_alone: list[SampleTokens] = [partial(sample_allowed, sample)]
    return torch_alone + ([] if compiled is None else [partial(sample_on_cpu, compiled)])


def allowed_of(rows: dict[int, list[int]]) -> TokenBits:
    words = torch.zeros((len(rows), 3), dtype=torch.int64)
    for place, tokens in enumerate(rows.values()):
        for token in tokens:
            words[place, token // 32] |= 1 << token % 32
    return TokenBits(torch.tensor(list(rows)), words.to(torch.int32))


def settings_of(temperature: list[float]) -> SamplingRows:
    count = len(temperature)
    return SamplingRows(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor([5] * count),
        top_p=torch.tensor([0.9] * count),
        min_p=torch.tensor([0.0] * count),
        seed=torch.arange(count),
        position=torch.arange(count) * 7,
        all_greedy=not any(temperature),
        any_top_k=True,
        any_top_p=True,
        any_min_p=False,
    )


ALLOWED = {0: [3, 31, 32, 69], 2: [40], 3: [], 4: list(range(1, 70, 2))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_against_the_reference(dtype: torch.dtype) -> None:
    logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = logits.clone()
    allowed = allowed_of(ALLOWED)
    assert torch.equal(allow_bits(logits, allowed), reference.allowed_only(logits, allowed))
    assert torch.equal(logits, before), "the logits are kept for log probabilities"


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("path", paths())
def test_samples_what_is_allowed(path: SampleTokens, temperature: float) -> None:
    rows = settings_of([temperature] * 4 + [0.0])
    for seed in range(20):
        logits = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(seed))
        tokens = path(logits, rows, allowed_of(ALLOWED)).tolist()
        masked = reference.allowed_only(logits, allowed_of(ALLOWED))
        kept = [0, 1, 2, 4]
        wanted = reference.sample(masked, rows).tolist()
        assert [tokens[row] for row in kept] == [wanted[row] for row in kept]
        assert tokens[3] == -1, "no token is allowed"


@pytest.mark.parametrize("path", paths())
def test_no_bits_change_nothing(path: SampleTokens) -> None:
    rows, logits = settings_of([0.0, 1.0]), torch.randn(2, VOCABULARY)
    assert path(logits, rows).tolist() == sample(logits, rows).tolist()
