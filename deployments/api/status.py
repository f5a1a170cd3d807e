"""Health, load, version and metrics, for operators and load balancers."""

import asyncio

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from rayfin import __version__
from rayfin.actors.metrics.render import merged
from rayfin.deployments.generation.service import ServedModels

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def add_status_routes(app: FastAPI, models: ServedModels) -> None:
    @app.get("/health")
    @app.get("/ping")  # SageMaker's name for it
    @app.post("/ping")
    async def health() -> Response:
        """Returns 200 if every model is healthy."""
        for service in models.services:
            await service.client.check_health()
        return Response()

    @app.get("/live")
    async def live() -> Response:
        """Returns 200 if this process answers; the engines do not matter."""
        return Response()

    @app.get("/load")
    async def load() -> dict[str, int]:
        return {"server_load": models.first.load.in_flight}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        texts = await asyncio.gather(*(service.client.metrics() for service in models.services))
        return Response(merged(texts), media_type=METRICS_TYPE)

    @app.get("/")
    async def root() -> Response:
        paths = {getattr(route, "path", "/") for route in app.routes} - {"/"}
        return JSONResponse({"name": "Rayfin", "version": __version__, "endpoints": sorted(paths)})
