"""The lists of tokens that a lease's rows bring to the device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.errors import NoTokenLeft, NumericalError
from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.device_rules import RowTokenRules
from rayfin.actors.runner.sampling.processor_chain import ProcessorChain
from rayfin.actors.runner.sampling.sampler import Sampler
from rayfin.kernels.shapes import ALLOWED, BANNED, BANNED_EARLY, USED

Make = Callable[..., Any]
PENALTIES = Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5)
EVERYTHING = Sampling(
    repetition_penalty=1.5,
    logit_bias=((3, 5.0), (7, -1.0)),
    allowed=(3, 4, 5),
    bad_words=((4,),),
    banned=(8, 5),
    banned_until=12,
)
NO_BIAS = 0.0


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def list_of(rules: RowTokenRules, row: int) -> dict[int, tuple[int, int, float]]:
    """token -> (count, kind, bias)."""
    arrays = rules.arrays
    first, length = int(arrays["first"][row]), int(arrays["length"][row])
    span = slice(first, first + length)
    columns = [arrays[name][span].tolist() for name in ("token", "count", "kind", "bias")]
    assert len(set(columns[0])) == length
    return {token: tuple(rest) for token, *rest in zip(*columns, strict=True)}


def chain_of(step_of: Make, row: Make, *requests: NewRequest) -> ProcessorChain:
    chain = ProcessorChain(torch.device("cpu"))
    chain.apply_diff(step_of(row(0, [1]), new=requests))
    return chain


def rules_of(chain: ProcessorChain, rows: int, num_steps: int) -> RowTokenRules:
    slots = np.arange(rows, dtype=np.int32)
    assert not chain.needs_host(slots).any()
    rules = chain.row_token_rules(slots, num_steps)
    assert rules is not None
    return rules


def test_lists(step_of: Make, row: Make) -> None:
    """Of rows 0 and 2 of three; each counting row has room for what it samples in the call."""
    penalties = NewRequest(0, PENALTIES, 99, frozenset(), ints(9, 3, 9, 3, 3, 11), 3)
    everything = NewRequest(2, EVERYTHING, 99, frozenset(), ints(3, 20), 2)
    rules = rules_of(chain_of(step_of, row, penalties, everything), 3, 4)
    assert list_of(rules, 0) == {
        9: (0, USED, NO_BIAS),
        3: (2, USED, NO_BIAS),
        11: (1, USED, NO_BIAS),
    }
    assert list_of(rules, 1) == {}
    assert list_of(rules, 2) == {
        3: (0, USED | ALLOWED, 5.0),
        20: (0, USED, NO_BIAS),
        4: (0, ALLOWED | BANNED, NO_BIAS),
        5: (0, ALLOWED | BANNED_EARLY, NO_BIAS),
        8: (0, BANNED_EARLY, NO_BIAS),
        7: (0, 0, -1.0),
    }
    assert rules.entries == 3 + 4 + 6 + 4 and rules.arrays["first"].tolist() == [0, 0, 7]
    assert rules.arrays["restricted"].tolist() == [0, 0, 1]
    assert rules.arrays["counted"].tolist() == [1, 0, 1]
    assert rules.arrays["banned_until"].tolist() == [0, 0, 12]
    assert rules.arrays["repetition"].tolist() == [1.5, 1.0, 1.5]
    assert rules.arrays["presence"].tolist() == [0.5, 0.0, 0.0]
    assert rules.arrays["frequency"].tolist() == [0.25, 0.0, 0.0]


def test_rows_that_do_not_count_get_no_room(step_of: Make, row: Make) -> None:
    bias = NewRequest(0, Sampling(logit_bias=((3, 5.0),)), 99)
    rules = rules_of(chain_of(step_of, row, bias), 1, 16)
    assert rules.entries == 1 and not rules.arrays["counted"].any()


def test_rows_that_need_the_host(step_of: Make, row: Make) -> None:
    """Bad words of several tokens, and no row beside theirs."""
    words = [(), ((1,),), ((1,), (1, 2))]
    requests = [
        NewRequest(slot, Sampling(bad_words=own), 99, frozenset(), ints(5), 1)
        for slot, own in enumerate(words)
    ]
    chain = chain_of(step_of, row, *requests)
    assert chain.needs_host(ints(0, 1, 2)).tolist() == [False, False, True]
    assert chain.needs_host(ints(2, 3)).tolist() == [True, False]


def test_what_the_device_cannot_do(step_of: Make, row: Make) -> None:
    """Lists without end."""
    pytest.importorskip("triton")
    from rayfin.actors.runner.gpu.graph_extras import MAX_ENTRIES, GraphExtras

    def rules(**sampling: object) -> RowTokenRules:
        own = Sampling(**sampling)  # type: ignore[arg-type]
        return rules_of(
            chain_of(step_of, row, NewRequest(0, own, 99, frozenset(), ints(), 0)), 1, 16
        )

    assert GraphExtras.fits(None) and GraphExtras.fits(rules(banned=(3,), banned_until=2))
    assert GraphExtras.fits(rules(bad_words=((1,),)))
    many = tuple(range(MAX_ENTRIES + 1))
    assert not GraphExtras.fits(rules(allowed=many))


def test_a_graph_whose_rules_leave_no_token(step_of: Make, row: Make) -> None:
    """A row of its own, one until its minimum length, and one whose logits are not finite."""
    cases = [
        Sampling(allowed=(3, 4), bad_words=((4,), (3,))),
        Sampling(allowed=(3, 4), bad_words=((4,),), banned=(3,), banned_until=12),
        Sampling(allowed=(3, 4), bad_words=((4,),), banned=(3,), banned_until=2),
        Sampling(),
    ]
    new = [
        NewRequest(i, sampling, 99, frozenset(), ints(9, 9), 2) for i, sampling in enumerate(cases)
    ]
    info = step_of(*(row(i, [1], 1) for i in range(len(cases))), new=new)
    sampler = Sampler(RequestSlots(len(cases), 4), torch.device("cpu"), lambda *_: ints())
    sampler.apply_diff(info)
    sampled = sampler.replayed(info, ints(-1, -1, -1, -1), None)
    kinds = [type(sampled.errors[place]) for place in range(len(cases))]
    assert kinds == [NoTokenLeft, NoTokenLeft, NumericalError, NumericalError]
