"""Groups of ranks, one of each kind for a module."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rank_groups import Group

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def group(engine_args: Make) -> Iterator[Make]:
    """Makes groups, which end with the module; those of the same settings are one."""
    made: dict[Any, Group] = {}
    with ExitStack() as stack:

        def make(folder: Path, tensor: int, stages: int, **settings: Any) -> Group:
            pages = settings.pop("num_pages", None)
            key = (engine_args(folder, **settings), tensor, stages, pages)
            if key in made:
                made[key].restart()
            else:
                made[key] = Group(*key)
                stack.callback(made[key].close)
            return made[key]

        yield make
