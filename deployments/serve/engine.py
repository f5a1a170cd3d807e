"""The Serve deployment that keeps one engine alive: its life cycle; no token passes here."""

import asyncio
import logging
import time

from ray import serve
from ray.serve.schema import ApplicationStatus

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable
from rayfin.actors.processes.logs import set_up
from rayfin.actors.supervision.supervisor import Supervisor
from rayfin.actors.timing import (
    HANDOVER_POLL_SECONDS,
    HANDOVER_SECONDS,
    HANDOVER_SETTLE_SECONDS,
    SERVE_HEALTH_PERIOD_SECONDS,
    SERVE_HEALTH_TIMEOUT_SECONDS,
)
from rayfin.deployments.client.engine_names import ENGINE, INGRESS, PREFILL, engine_prefix
from rayfin.deployments.serve.autoscaling import AutoscalingReport

logger = logging.getLogger(__name__)


@serve.deployment(
    name=ENGINE,
    num_replicas=1,
    ray_actor_options={"num_cpus": 0},
    health_check_period_s=SERVE_HEALTH_PERIOD_SECONDS,
    health_check_timeout_s=SERVE_HEALTH_TIMEOUT_SECONDS,
    max_constructor_retry_count=2,
)
class EngineDeployment:
    """One replica = the supervisor of one engine, found by ingresses in Ray's actor registry.

    The engine does not die with the replica: the next one adopts it.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        args: EngineArgs,
        drain_seconds: float,
        batches_scale: bool = False,
        ongoing_requests: float | None = None,
        prefills_for: str = "",
    ) -> None:
        set_up(args.log_format, args.log_level)
        self._drain_seconds = drain_seconds
        self._report = AutoscalingReport(batches_scale, ongoing_requests)
        context = serve.get_replica_context()
        self._app = context.app_name
        prefix = engine_prefix(context.app_name, context.deployment)
        if prefills_for:  # another deployment, as one of whose engines it is found
            prefix = engine_prefix(context.app_name, prefills_for) + PREFILL
        self._supervisor = Supervisor(args, prefix, detached=True)
        await self._supervisor.start()

    async def check_health(self) -> None:
        """Fails when the engine cannot be repaired in place: then Serve replaces the replica."""
        try:
            self._supervisor.check()
        except EngineUnavailable as error:
            logger.error("%s", error)
            raise

    async def started(self) -> None:
        """Returns, for the engine is there: a call that waited for it (wait_for_engine.py)."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Statistics for Serve's controller; see deployments/serve/autoscaling.py."""
        return self._report.update(self._supervisor.stats, time.monotonic())

    async def __del__(self) -> None:
        """Serve's last call: what runs may finish or is moved, then the engine goes."""
        try:
            async with asyncio.timeout(HANDOVER_SECONDS + HANDOVER_SETTLE_SECONDS):
                if await self._supervisor.is_replaced():
                    await wait_for_new_ingresses(self._app)
        except Exception as error:  # Ray or Serve does not answer: the engine leaves all the same
            logger.warning("engine does not wait for new ingresses: %r", error)
        try:
            await self._supervisor.drain(self._drain_seconds)
        finally:
            self._supervisor.stop()


async def wait_for_new_ingresses(app: str, seconds: float = HANDOVER_SECONDS) -> None:
    """Returns when an update of ``app`` has replaced its ingresses, or after ``seconds``.

    The old ingresses can use the old engine only, and take requests until then. Returns at once
    if the application is deleted.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        status = (await asyncio.to_thread(serve.status)).applications.get(app)
        if status is None or status.status is ApplicationStatus.DELETING:
            return
        ingress = status.deployments.get(INGRESS)
        if ingress is None or ingress.status == "HEALTHY":
            # The proxies still have to hear of it.
            await asyncio.sleep(HANDOVER_SETTLE_SECONDS)
            return
        await asyncio.sleep(HANDOVER_POLL_SECONDS)
    logger.info("old ingresses are still there after %.0f s; the engine drains", seconds)
