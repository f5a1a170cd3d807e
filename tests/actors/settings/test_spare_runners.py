"""How many spare runners an engine has."""

import pytest

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.settings.spare_runners import (
    LEFT_BYTES,
    SPARE_BYTES,
    most_spares,
    seats,
    spares_that_fit,
)

ENOUGH = LEFT_BYTES + SPARE_BYTES


@pytest.mark.parametrize(
    ("asked", "free", "served", "device", "expected"),
    [
        (None, ENOUGH, True, "cpu", 1),
        (None, ENOUGH - 1, True, "cpu", 0),
        (None, ENOUGH, False, "cpu", 0),
        (None, ENOUGH, True, "cuda", 0),
        (0, ENOUGH, True, "cpu", 0),
        (2, 0, False, "cpu", 2),
        (2, ENOUGH, True, "cuda", 0),
    ],
)
def test_spares_that_fit(
    asked: int | None, free: int, served: bool, device: str, expected: int
) -> None:
    assert spares_that_fit(asked, free, served=served, device=device) == expected


def test_several_ranks_have_none() -> None:
    ranks = EngineArgs(tensor_parallel_size=2)
    assert (most_spares(ranks), seats(ranks)) == (0, 2)
    with pytest.raises(InvalidConfig, match="for one device") as caught:
        EngineArgs(pipeline_parallel_size=2, spare_runners=1)
    assert caught.value.param == "spare_runners"
    assert seats(EngineArgs(pipeline_parallel_size=2, spare_runners=0)) == 2


def test_each_spare_has_a_name() -> None:
    assert [seats(EngineArgs(spare_runners=asked)) for asked in (None, 0, 1, 3)] == [2, 1, 2, 4]


def test_less_than_none_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="at least 0"):
        EngineArgs(spare_runners=-1)


def test_it_decides_no_token() -> None:
    """An ingress connects to engines with and without spares alike."""
    assert EngineArgs(spare_runners=1).identity == EngineArgs().identity
