"""An operator's limits of images: read from flags, and held by the reader and the body's limit."""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, InvalidRequest
from rayfin.deployments import app
from rayfin.deployments.http.body_limits import MAX_BODY_BYTES, MAX_MEDIA_BODY_BYTES
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.serve.server_args import ServerArgs
from vision_models import VisionModel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return VisionModel("llava", tmp_path_factory.mktemp("llava"))


def test_flags(tmp_path: Path) -> None:
    assert ServerArgs().media_settings() == MediaSettings()
    given = ServerArgs(
        limit_mm_per_prompt='{"image": 2}',
        max_image_pixels=100,
        max_media_bytes=200,
        max_audio_seconds=20.0,
        audio_chunk_seconds=10.0,
        max_audio_upload_seconds=60.0,
        max_audio_upload_bytes=400,
        media_timeout=0.5,
        no_media_urls=True,
        allowed_media_domains=["Good.Example."],
        allowed_local_media_path=str(tmp_path),
        mm_processor_cache_gb=0.5,
    )
    assert given.media_settings() == MediaSettings(
        max_images=2,
        max_pixels=100,
        max_bytes=200,
        max_seconds=20.0,
        chunk_seconds=10.0,
        max_upload_seconds=60.0,
        max_upload_bytes=400,
        timeout=0.5,
        urls=False,
        domains=("good.example",),
        folder=str(tmp_path),
        cache_bytes=2**29,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_image_pixels", 0), ("max_media_bytes", -1), ("media_timeout", 0.0)),
        *(("audio_chunk_seconds", 0.5), ("max_audio_upload_seconds", 0.0)),
        *(("max_audio_upload_bytes", 0), ("max_audio_seconds", -1.0)),
        *(("media_timeout", float("nan")), ("mm_processor_cache_gb", -0.1)),
        *(
            ("allowed_local_media_path", "/no/such/folder"),
            ("limit_mm_per_prompt", '{"image": -1}'),
        ),
    ],
)
def test_flags_that_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidConfig) as refused:
        ServerArgs(**{name: value}).media_settings()
    assert refused.value.param == name


def png(side: int, seed: int) -> str:
    """A picture that does not compress, as a data: address."""
    drawn = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(drawn, "RGB").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def refusal(tiny: VisionModel, settings: MediaSettings, *urls: str) -> tuple[str | None, str]:
    reader = MediaReader(tiny.processor, settings)
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    with pytest.raises(InvalidRequest) as refused:
        reader.read_now([{"role": "user", "content": content}], "messages")
    return refused.value.param, refused.value.code or ""


def test_bytes_of_an_image_and_of_all(tiny: VisionModel) -> None:
    small, large = png(10, 0), png(20, 1)
    whole = MediaSettings(max_bytes=1000)
    reader = MediaReader(tiny.processor, whole)
    content = [{"type": "image_url", "image_url": {"url": small}}] * 3
    assert len(reader.read_now([{"role": "user", "content": content}], "messages")) == 3
    path = "messages[0].content[{}].image_url.url"
    assert refusal(tiny, whole, small, large) == (path.format(1), "invalid_image")
    both = MediaSettings(max_total_bytes=1000)
    assert refusal(tiny, both, small, small, small) == (path.format(2), "invalid_image")


def test_pixels_of_an_image(tiny: VisionModel) -> None:
    settings = MediaSettings(max_pixels=399)
    path = "messages[0].content[0].image_url.url"
    assert refusal(tiny, settings, png(20, 0)) == (path, "invalid_image")


def test_bodies_may_be_larger_where_images_are_read(
    tiny: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the operator says how large, or the model is served for its text."""
    monkeypatch.setattr(app, "has_room", lambda *_: True)
    edges: list[Any] = []
    real = app.edge_settings

    def note(server: ServerArgs) -> Any:
        edges.append(server.max_body_bytes)
        return real(server)

    monkeypatch.setattr(app, "edge_settings", note)
    seeing = EngineArgs(model=str(tiny.folder))
    reading = EngineArgs(model=str(tiny.folder), language_model_only=True)
    for engine, server in (
        (seeing, ServerArgs()),
        (seeing, ServerArgs(max_body_bytes=1000)),
        (reading, ServerArgs()),
    ):
        app.bind_app(server, engine)
    assert edges == [MAX_MEDIA_BODY_BYTES, 1000, MAX_BODY_BYTES]
