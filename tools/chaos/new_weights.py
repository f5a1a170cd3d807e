"""New weights amid deaths: all engines serve them at the end, and no request is lost.

They are the weights that are served, under another name, so that the oracle knows each token.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

import httpx
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
        headers = {"Authorization": f"Bearer {KEY}"}
        nemesis.plant_once(f"weights.{failpoint}=exit")
        async with httpx.AsyncClient(base_url=nemesis.cluster.url, headers=headers) as http:
            await _give(nemesis, http, label, mode)
            nemesis.plant("")
            await _agree(nemesis, http, label)

    return act


async def _give(nemesis: Nemesis, http: httpx.AsyncClient, label: str, mode: str) -> None:
    """Calls until it is done: a coordinator that dies takes its call along."""
    body = {"path": str(DEMO_FOLDER / "model.safetensors"), "version": label, "mode": mode}
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


async def _agree(nemesis: Nemesis, http: httpx.AsyncClient, label: str) -> None:
    """All engines serve them soon, and none stays paused."""
    said, deadline = "nothing", time.monotonic() + AGREED_SECONDS
    while time.monotonic() < deadline:
        try:
            answer = await http.get("/admin/weights", timeout=AGREED_SECONDS)
            state, said = answer.json(), answer.text
            engines = state.get("engines", {}).values()
            if (
                len(engines) == nemesis.cluster.layout.engines
                and (state["version"], state["behind"]) == (label, [])
                and not any(engine["pausing"] for engine in engines)
            ):
                return
        except httpx.HTTPError as error:
            said = repr(error)
        await asyncio.sleep(0.2)
    nemesis.complaints.append(f"engines do not agree on {label!r}: {said[:600]}")
