"""Runs jobs on an engine of this process, without a server."""

import time
from collections.abc import Sequence

import numpy as np

from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.deployments.bench.measures import Timeline
from rayfin.deployments.bench.workload import Job
from rayfin.deployments.offline.engines import OfflineEngine


def run_offline(engine: OfflineEngine, jobs: Sequence[Job]) -> list[Timeline]:
    """Runs all jobs at once, greedily and to their full lengths; arrival times are ignored."""
    requests = [
        EngineRequest(
            f"bench-{key}",
            np.array(job.prompt, np.int32),
            Sampling(),
            StopRules(job.output_tokens),
            key=key,
        )
        for key, job in enumerate(jobs)
    ]
    start = time.perf_counter()
    timelines = [Timeline(start, len(job.prompt)) for job in jobs]
    for deltas in engine.run(requests):
        now = time.perf_counter()
        keys, counts = np.unique(deltas.keys, return_counts=True)
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            timelines[key].add(now, count)
        for ended in deltas.ended:
            if ended.error is not None:
                timelines[ended.key].error = str(ended.error)
    return timelines
