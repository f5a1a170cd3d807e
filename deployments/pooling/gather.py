"""Runs the engine requests of one HTTP body, and gathers their vectors."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from rayfin.actors.errors import RayfinError, RequestFailed
from rayfin.actors.messages import EngineRequest, Float32Array
from rayfin.actors.model_files.pooling_recipe import PoolingTask
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.sse import cancelled
from rayfin.deployments.pooling.inputs import PoolingInput, build_pooling


@dataclass(slots=True)
class Pooled:
    """The vectors of a body's inputs, in their order, and what they cost."""

    vectors: list[Float32Array]
    prompt_tokens: int
    headers: dict[str, str] = field(default_factory=dict)  # the rest of the tenant's quota


async def pool(
    service: OpenAIService,
    inputs: Sequence[PoolingInput],
    params: Sequence[str],
    caller: Caller,
    *,
    request_id: str,
    task: PoolingTask | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
) -> Pooled:
    """All inputs at once: they reach their engine in one call. The first failure ends the rest.

    Raises:
        RayfinError: an input is refused, or failed.
    """
    assert service.recipe is not None
    service.check_priority(priority, caller.tenant)
    requests = build_pooling(
        inputs,
        [service.recipe.pooling(task, prompt.skip, prompt.second) for prompt in inputs],
        await service.client.info(),
        request_id=request_id,
        params=params,
        priority=priority,
        arrival=time.monotonic() if caller.arrival is None else caller.arrival,
        cache_salt=cache_salt,
    )
    for request in requests:
        request.tenant, request.timeout = caller.tenant, caller.timeout
        request.session, request.background = caller.session, caller.background
    tokens = sum(len(prompt.ids) for prompt in inputs)
    headers: dict[str, str] = {}
    if service.quotas is not None:
        headers = service.quotas.admit(caller.tenant, tokens)
    try:
        vectors = await _gather(service, requests)
    except RayfinError:
        if service.quotas is not None:
            service.quotas.spend(caller.tenant, -tokens)
        raise
    return Pooled(vectors, tokens, headers)


async def _gather(service: OpenAIService, requests: Sequence[EngineRequest]) -> list[Float32Array]:
    if len(requests) == 1:
        return [await _vector(service, requests[0])]
    tasks = [asyncio.create_task(_vector(service, request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancelled(*tasks)


async def _vector(service: OpenAIService, request: EngineRequest) -> Float32Array:
    async with aclosing(service.client.stream(request)) as deltas:
        async for delta in deltas:
            if delta.vector is not None:
                return delta.vector
            if delta.finish_reason is not None:
                break
    raise RequestFailed("The engine failed on this request.")
