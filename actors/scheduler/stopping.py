"""When a request ends: end of sequence, a stop token, its length. The ingress has stop strings."""

import numpy as np

from rayfin.actors.messages import Int32Array, Int64Array
from rayfin.actors.scheduler.request import Request
from rayfin.actors.scheduler.running_table import RunningTable


def ended_requests(
    running: RunningTable, slots: Int64Array, tokens: Int32Array
) -> list[tuple[Request, str, int | None]]:
    """The requests of ``slots`` [N] that end with the tokens [N] just appended.

    Returns:
        (request, finish reason, stop reason) of each. A stop token takes precedence over the
        length, as in vLLM; the stop reason is its id, or None for end of sequence.
    """
    stopped, full = running.stops.ended(slots, tokens, running.num_known[slots])
    ended: list[tuple[Request, str, int | None]] = []
    for row in np.flatnonzero(stopped | full).tolist():
        request, token = running.request(int(slots[row])), int(tokens[row])
        if stopped[row]:
            is_eos = token in request.source.stopping.eos_token_ids
            ended.append((request, "stop", None if is_eos else token))
        else:
            ended.append((request, "length", None))
    return ended
