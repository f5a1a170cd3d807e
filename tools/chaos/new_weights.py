"""New weights amid deaths: all engines serve them at the end, and no request is lost.

They are the weights that are served, under another name, so that the oracle knows each token.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

import httpx
from faults import drain_in_turn
from nemesis import Nemesis

from rayfin.deployments.serve.preflight import DEMO_FOLDER

KEY = "operator"
FAILPOINTS = ("stage", "vote", "decide", "current", "layer", "reply", "resume")
"""Where a scheduler, runner or coordinator dies amid an update, in the order of its course."""

CALL_SECONDS, AGREED_SECONDS = 90.0, 30.0
_numbers = itertools.count(1)


def update_amid(failpoint: str, mode: str) -> Callable[[Nemesis], Awaitable[None]]:
    """Makes a fault: an update, amid which the first process to come to ``failpoint`` dies.

    Args:
        mode: what running requests do.
    """

    async def act(nemesis: Nemesis) -> None:
        label = f"{failpoint}-{next(_numbers)}"
        nemesis.plant_once(f"weights.{failpoint}=exit")
        async with _operator(nemesis) as http:
            await _give(nemesis, http, label, mode)
            nemesis.plant("")
            await _agree(nemesis, http, label)

    return act


async def update_in_turn(nemesis: Nemesis) -> None:
    """Updates of one engine after the other, whose streams go to the others; then a death."""
    async with _operator(nemesis) as http:
        for _ in range(2):
            await _update(nemesis, http, order="in_turn")
        nemesis.plant_once("weights.current=exit")
        label = await _update(nemesis, http, order="in_turn")
        nemesis.plant("")
        await _agree(nemesis, http, label)


async def update_while_pages_move(nemesis: Nemesis) -> None:
    """Updates engines again and again while they drain in turn, and their pages come slowly."""
    nemesis.plant("runner.record=sleep:0.05")
    async with _operator(nemesis) as http:
        moving = asyncio.create_task(drain_in_turn(nemesis))
        while not moving.done():
            label = await _update(nemesis, http)
            await asyncio.sleep(nemesis.random.uniform(0.0, 1.0))
        await moving
        nemesis.plant("")
        await _agree(nemesis, http, label)


async def kill_runner_after_updates(nemesis: Nemesis) -> None:
    """Kills a runner whose successor loads the third version over the model's own weights."""
    async with _operator(nemesis) as http:
        for _ in range(3):
            label = await _update(nemesis, http)
        nemesis.kill("runner")
        await _agree(nemesis, http, label)


async def join_after_updates(nemesis: Nemesis) -> None:
    """An engine that comes serves what the others do, and none other at any time."""
    async with _operator(nemesis) as http:
        for _ in range(2):
            label = await _update(nemesis, http)
        nemesis.strike()
        await asyncio.to_thread(nemesis.cluster.deploy, 2)
        await _agree(nemesis, http, label, engines=2)
        label = await _update(nemesis, http)
        await _agree(nemesis, http, label, engines=2)
        await asyncio.to_thread(nemesis.cluster.deploy)


def _operator(nemesis: Nemesis) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=nemesis.cluster.url, headers=headers)


async def _update(nemesis: Nemesis, http: httpx.AsyncClient, **fields: str) -> str:
    """Gives the weights another name, which it returns."""
    nemesis.strike()
    label = f"version-{next(_numbers)}"
    await _give(nemesis, http, label, "keep", **fields)
    return label


async def _give(
    nemesis: Nemesis, http: httpx.AsyncClient, label: str, mode: str, **fields: str
) -> None:
    """Calls until it is done: a coordinator that dies takes its call along."""
    path = str(DEMO_FOLDER / "model.safetensors")
    body = {"path": path, "version": label, "mode": mode, **fields}
    answer, deadline = "none", time.monotonic() + CALL_SECONDS
    while time.monotonic() < deadline:
        try:
            given = await http.post("/admin/weights", json=body, timeout=CALL_SECONDS)
        except httpx.HTTPError as error:
            answer = repr(error)
        else:
            if given.status_code == 200:
                return
            answer = given.text
        await asyncio.sleep(0.5)
    nemesis.complaints.append(f"the weights {label!r} are not taken: {answer[:300]}")


async def _agree(
    nemesis: Nemesis, http: httpx.AsyncClient, label: str, engines: int | None = None
) -> None:
    """All engines serve them soon, and none stays paused; so many as the layout has, or given."""
    count = engines or nemesis.cluster.layout.engines
    said, deadline = "nothing", time.monotonic() + AGREED_SECONDS
    while time.monotonic() < deadline:
        try:
            answer = await http.get("/admin/weights", timeout=AGREED_SECONDS)
            state, said = answer.json(), answer.text
            said_by = state.get("engines", {}).values()
            if (
                len(said_by) == count
                and (state["version"], state["behind"]) == (label, [])
                and not any(engine["pausing"] or engine["leaving"] for engine in said_by)
            ):
                return
        except httpx.HTTPError as error:
            said = repr(error)
        await asyncio.sleep(0.2)
    nemesis.complaints.append(f"engines do not agree on {label!r}: {said[:600]}")
