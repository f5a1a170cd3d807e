"""The page at /ui: a chat and a live view of the engines. Static files, no build step, no CDN."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from rayfin import __version__
from rayfin.deployments.batches.folder import BatchFolder
from rayfin.deployments.generation.service import ServedModels
from rayfin.deployments.http.paths import FILES
from rayfin.deployments.http.query import tenant_of

SHOWN_BATCHES = 8
FOLDER = Path(__file__).parent / "web" / "page"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_web_routes(app: FastAPI, models: ServedModels, folder: BatchFolder | None = None) -> None:
    """Adds the page's files, and ``/ui/state``, which the page polls twice a second.

    It has the newest batches of the caller's tenant, if there is a ``folder`` of them.
    """
    contents = {path: (FOLDER / name).read_bytes() for path, (name, _) in FILES.items()}

    @app.get("/ui/state")
    async def state(request: Request) -> dict[str, Any]:
        tenant = tenant_of(request)
        batches = [] if folder is None else await asyncio.to_thread(folder.batches, tenant)
        return {
            "version": __version__,
            "batches": [batch.shown() for batch in batches[:SHOWN_BATCHES]],
            "models": [
                {
                    "model": service.name,
                    "engines": [asdict(snapshot) for snapshot in await service.client.snapshots()],
                    "latency": service.client.latency(),
                }
                for service in models.services
            ],
        }

    @app.get("/ui", include_in_schema=False)
    async def page() -> Response:
        return file("/ui")

    @app.get("/ui/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return file(f"/ui/{name}")

    def file(path: str) -> Response:
        if path not in FILES:
            raise HTTPException(404)
        return Response(contents[path], media_type=FILES[path][1], headers=HEADERS)
