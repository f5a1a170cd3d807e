"""The Serve deployment that keeps the stored responses of several ingress replicas."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from rayfin.actors.errors import EngineUnavailable, RayfinError
from rayfin.actors.timing import RESPONSE_STORE_CALL_SECONDS
from rayfin.deployments.api.responses.store import ResponseStore


@serve.deployment(
    name="responses",
    num_replicas=1,
    ray_actor_options={"num_cpus": 0},
    max_ongoing_requests=2**16,  # nearly all of them wait for something to happen
)
class ResponseStoreDeployment:
    """A ``ResponseStore`` in its own process: without a folder it ends with the process.

    Ingress replicas outlive it, and the responses that they run.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._store = ResponseStore.over(folder, alone=True)

    async def call(self, method: str, *args: object) -> object:
        """Returns what the named method of the store returns."""
        answer: object = await self._store.call(method, *args)
        return answer


def store_calls(
    handle: DeploymentHandle[Any],
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Returns a function that calls the store over a handle: ``await call("get", ...)``.

    Raises:
        RayfinError: the method's own error, or EngineUnavailable if the store does not answer.
    """

    async def call(method: str, *args: object) -> object:
        try:
            async with asyncio.timeout(RESPONSE_STORE_CALL_SECONDS):
                answer: object = await handle.call.remote(method, *args)
                return answer
        except RayTaskError as error:
            if isinstance(error.cause, RayfinError):
                raise error.cause from None
            raise EngineUnavailable(f"the store of responses failed: {error.cause}") from error
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineUnavailable("the store of responses does not answer") from error

    return call
