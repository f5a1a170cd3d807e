"""The lists of tokens that a lease's rows bring to the device."""

import numpy as np
import pytest

from rayfin.actors.messages import Sampling
from rayfin.actors.runner.sampling.token_rules import (
    RowTokenRules,
    Ruled,
    TokenCounts,
    make_row_token_rules,
)
from rayfin.actors.runner.step.request_slots import NO_LOGPROBS
from rayfin.kernels.shapes import ALLOWED, BANNED, BANNED_EARLY, USED

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


def test_lists() -> None:
    """Of rows 0 and 2 of three; each counting row has room for what it samples in the lease."""
    used = TokenCounts(ints(9, 3, 9), ints(3, 3, 11))
    rules = make_row_token_rules(
        3, [Ruled(0, PENALTIES, used), Ruled(2, EVERYTHING, TokenCounts(ints(3, 20), ints()))], 4
    )
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


def test_rows_that_do_not_count_get_no_room() -> None:
    bias = Sampling(logit_bias=((3, 5.0),))
    rules = make_row_token_rules(1, [Ruled(0, bias, None)], 16)
    assert rules.entries == 1 and not rules.arrays["counted"].any() and not rules.needs_host


def test_what_the_device_cannot_do() -> None:
    """Bad words of several tokens, lists without end, more log probabilities than it keeps."""
    pytest.importorskip("triton")
    from rayfin.actors.runner.gpu.graph_extras import MAX_ENTRIES, GraphExtras
    from rayfin.kernels.triton.logprobs import MAX_TOP_LOGPROBS

    def rules(**sampling: object) -> RowTokenRules:
        own = Sampling(**sampling)  # type: ignore[arg-type]
        return make_row_token_rules(1, [Ruled(0, own, None)], 16)

    none, most = np.array([NO_LOGPROBS]), np.array([MAX_TOP_LOGPROBS])
    assert GraphExtras.fits(None, none) and GraphExtras.fits(rules(banned=(3,)), most)
    assert not GraphExtras.fits(None, most + 1)
    assert GraphExtras.fits(rules(bad_words=((1,),)), none)
    assert not GraphExtras.fits(rules(bad_words=((1,), (1, 2))), none)
    many = tuple(range(MAX_ENTRIES + 1))
    assert not GraphExtras.fits(rules(allowed=many), none)
