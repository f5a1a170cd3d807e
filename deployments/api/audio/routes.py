"""Speech over HTTP: /v1/audio/transcriptions and /v1/audio/translations."""

from fastapi import FastAPI, Request, Response

from rayfin.deployments.api.audio.adapter import TranscriptionAdapter
from rayfin.deployments.api.audio.form import Task, read_form
from rayfin.deployments.generation.route import GenerationRoute
from rayfin.deployments.generation.service import ServedModels


def add_audio_routes(app: FastAPI, models: ServedModels) -> None:
    """Adds the routes of models that hear."""

    async def answer(request: Request, task: Task) -> Response:
        async def check(name: str | None) -> None:
            _, media = await models.resolve_hearing(request, name)
            media.room.check()

        if not models.max_upload_bytes:
            await check(None)  # which says what the first model does instead
        form = await read_form(request, task, models.max_upload_bytes, check)
        service, media = await models.resolve_hearing(request, form.model)
        adapter = TranscriptionAdapter(service, media, form)
        del form  # with the file, which the adapter forgets once it is read
        return await GenerationRoute(adapter).answer(request, {})

    @app.post("/v1/audio/transcriptions")
    async def transcriptions(request: Request) -> Response:
        return await answer(request, "transcribe")

    @app.post("/v1/audio/translations")
    async def translations(request: Request) -> Response:
        return await answer(request, "translate")
