"""Engines of other supervisors: those that can be claimed, and runners that have no scheduler."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ray.exceptions import ActorUnavailableError, RayError

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable
from rayfin.actors.processes.registry import engine_names, find_actor, runner_name
from rayfin.actors.scheduler.actor import EngineClaim
from rayfin.actors.settings.spare_runners import seats
from rayfin.actors.timing import MISSED_PULSES, PULSE_ANSWER_SECONDS, PULSE_SECONDS

logger = logging.getLogger(__name__)


def numbered(prefix: str) -> list[str]:
    """Returns the engines whose names are ``prefix`` and a number."""
    return [name for name in engine_names(prefix) if name.removeprefix(prefix).isdecimal()]


async def claim_engine(
    prefix: str, owner: str, args: EngineArgs
) -> tuple[str, Any, EngineClaim] | None:
    """Claims an engine of the same settings whose supervisor has fallen silent.

    Waits for one whose supervisor has died recently, until it may be claimed, and for one that was
    started ahead, until it has started. One that does not answer is asked again, as often as a
    pulse may be missed: on a busy machine an answer may be late, and a second engine would load
    the model beside it.

    Returns:
        Its name, its scheduler and the granted claim, or None if there is no such engine.
    """
    missed: Counter[str] = Counter()  # answers in a row, by name
    while True:
        waiting = False
        for name in await asyncio.to_thread(numbered, prefix):
            scheduler = find_actor(name)
            try:
                claim = None if scheduler is None else await _claim(name, scheduler, owner, args)
            except TimeoutError:
                missed[name] += 1
                waiting |= missed[name] < MISSED_PULSES
                continue
            missed[name] = 0
            if claim is not None and claim.granted:
                return name, scheduler, claim
            waiting |= claim is not None and _may_be_granted(claim)
        if not waiting:
            return None
        await asyncio.sleep(PULSE_SECONDS / 2)


def _may_be_granted(claim: EngineClaim) -> bool:
    """Whether a claim that was refused may soon be granted."""
    return claim.starting or (claim.compatible and claim.silence > PULSE_SECONDS)


async def _claim(name: str, scheduler: Any, owner: str, args: EngineArgs) -> EngineClaim | None:
    """Returns None if the scheduler is dead, or of other code.

    Raises:
        TimeoutError: it does not answer now.
    """
    try:
        call = scheduler.claim.remote(owner, args, args.identity)
        claim: EngineClaim = await asyncio.wait_for(call, PULSE_ANSWER_SECONDS)
    except (ActorUnavailableError, TimeoutError) as error:
        logger.warning("engine %s does not answer a claim: %r", name, error)
        raise TimeoutError from error
    except RayError as error:
        logger.warning("engine %s cannot be claimed: %s", name, error)
        return None
    return claim


def engines_without_scheduler(names: list[str], args: EngineArgs) -> Iterator[str]:
    """Those of ``names`` that have lost their scheduler, but not yet their runners."""
    for name in names:
        if find_actor(name) is None and has_runners(name, args):
            yield name


def has_runners(name: str, args: EngineArgs) -> bool:
    """Whether any runner of the engine ``name`` exists, or a spare of it."""
    names = [runner_name(name, seat) for seat in range(seats(args))]
    return any(find_actor(each) is not None for each in names)


async def other_model_exists(name: str, identity: str) -> bool:
    """Whether an engine of the same Serve deployment serves another model than ``identity``."""
    prefix = name.rpartition("/")[0] + "/"
    for other in await asyncio.to_thread(engine_names, prefix):
        if other != name and (scheduler := find_actor(other)) is not None:
            with suppress(RayError, EngineUnavailable, TimeoutError):
                info = await asyncio.wait_for(scheduler.info.remote(), PULSE_ANSWER_SECONDS)
                if info.identity != identity:
                    return True
    return False
