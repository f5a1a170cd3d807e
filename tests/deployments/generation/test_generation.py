"""Texts of one request beside other requests."""

import asyncio
from functools import partial

import pytest

from rayfin.deployments.generation.generation import LONG_TEXT, off_loop

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_others_run_between_the_texts_of_a_request() -> None:
    done: list[str] = []

    async def request(name: str) -> None:
        for _ in range(3):
            await off_loop(LONG_TEXT - 1, partial(done.append, name))

    await asyncio.gather(request("a"), request("b"))
    assert done == ["a", "b"] * 3
