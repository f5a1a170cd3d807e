"""Tokens that a CUDA graph has sampled, by rows of a step, and whose rows may be in one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.errors import NumericalError
from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import Sampler
from rayfin.kernels.sampling.sample import sample


def test_rows_whose_prompts_go_on_sample_nothing(
    row: Callable[..., Any], step_of: Callable[..., Any]
) -> None:
    """A graph samples for them as well; only what another row lacks is an error."""
    info = step_of(
        row(0, [5], kv_len=3, decoding=True),
        row(1, [1, 2], samples=False),
        row(2, [1, 2], samples=False),
        row(3, [1, 2]),
    )
    sampler = Sampler(RequestSlots(4, 2), torch.device("cpu"), sample)
    given = sampler.replayed(info, np.array([7, 9, -1, -1], np.int32), None)
    assert given.tokens.tolist() == [7, -1, -1, -1]
    assert [type(error) for error in given.errors.values()] == [NumericalError]
    assert list(given.errors) == [3]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "seed": 5},
        {"banned": (3,), "banned_until": 9},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": ((3, 1.0),)},
        {"allowed": (3, 4)},
        {"bad_words": ((3,),)},
        {"logprobs": 0},
        {"logprobs": 2, "processed": True},
        {"prompt_logprobs": 0},
    ],
)
def test_a_request_that_enters_without_rules_has_a_row_without(
    changed: dict[str, Any], row: Callable[..., Any], step_of: Callable[..., Any]
) -> None:
    slots = RequestSlots(1, 2)
    sampler = Sampler(slots, torch.device("cpu"), sample)
    history = np.array([1, 2], np.int32)
    request = NewRequest(0, Sampling(**changed), cap=9, history=history, prompt_len=2)
    info = step_of(row(0, [1, 2]), new=[request])
    free = sampler.enters_free(request)
    slots.apply(info)
    sampler.apply_diff(info)
    assert free == (sampler.is_free(info.ids).all() and not slots.scored)
    assert free == (not changed or "seed" in changed or changed == {"logprobs": 0})
