"""What an operator may tell an engine, between two of its steps."""

from enum import StrEnum

from rayfin.actors.scheduler.engine import Engine


class Command(StrEnum):
    """One word each, as the doors spell them."""

    DRAIN = "drain"  # takes no more requests; what is there may finish
    ADMIT = "admit"  # takes requests again
    RESET_CACHE = "reset_cache"  # forgets what free pages hold
    SLEEP = "sleep"  # gives the memory of its pages back; what is there waits
    WAKE = "wake"


def carry_out(engine: Engine, command: Command) -> None:
    """For the thread that steps.

    Raises:
        EngineUnavailable: the engine could not.
    """
    match command:
        case Command.DRAIN:
            engine.drain()
        case Command.ADMIT:
            engine.admit_again()
        case Command.RESET_CACHE:
            engine.forget_prefixes()
        case Command.SLEEP:
            engine.sleep()
        case Command.WAKE:
            engine.wake()
