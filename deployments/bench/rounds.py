"""Peers that take turns on the same jobs: A B A B, so that a slow minute hits all of them."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rayfin.deployments.bench.measures import Timeline
from rayfin.deployments.bench.peers import Peer, PeerSpec
from rayfin.deployments.bench.workload import Job, varied


def take_turns(
    specs: Sequence[PeerSpec],
    model: Path,
    jobs: Sequence[Job],
    rounds: int,
    say: Callable[[str], object],
) -> dict[str, list[list[Timeline]]]:
    """Timelines by peer, one list for each round; a round before them warms up.

    Every round has other tokens in its prompts (of the same lengths, sharing the same prefixes), so
    that no cache remembers the round before.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = []
        for spec in specs:
            peers.append(stack.enter_context(Peer(spec, model, folder / f"{spec.name}.log")))
            say(f"{spec.name}: {peers[-1].version}, ready in {peers[-1].ready_seconds:.1f} s")
        results: dict[str, list[list[Timeline]]] = {spec.name: [] for spec in specs}
        for number in range(rounds + 1):
            for peer in peers:
                timelines = peer.run(varied(jobs, number))
                if number:
                    results[peer.spec.name].append(timelines)
    return results
