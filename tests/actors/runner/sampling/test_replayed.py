"""Tokens that a CUDA graph has sampled, by rows of a step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rayfin.actors.errors import NumericalError
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
