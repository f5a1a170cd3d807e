"""The images of one request: fetched, decoded and processed, never on the event loop."""

import asyncio
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from PIL import Image

from rayfin.actors.errors import InvalidRequest, RayfinError
from rayfin.actors.images.image_input import ImageInput
from rayfin.actors.images.processor import ImageProcessor, ProcessedImage, put_images
from rayfin.deployments.media.decode import decode, to_rgb
from rayfin.deployments.media.parts import ImagePart, read_part
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.telemetry.image_counters import ImageCounters
from rayfin.deployments.text.messages import is_image

if TYPE_CHECKING:  # which imports an HTTP client
    from rayfin.deployments.media.fetch import MediaFetcher


class MediaReader:
    """Reads the images of requests for one model. Threads and tasks may share it.

    Args:
        processor: the model's.
        put: what an engine gets in place of an image's arrays, a Ray reference say.
    """

    def __init__(
        self,
        processor: ImageProcessor,
        settings: MediaSettings | None = None,
        put: Callable[[Any], Any] | None = None,
        fetcher: "MediaFetcher | None" = None,
    ) -> None:
        self.processor = processor
        self.settings = settings or MediaSettings()
        self._put = put
        if fetcher is None:
            from rayfin.deployments.media.fetch import MediaFetcher

            fetcher = MediaFetcher(self.settings)
        self._fetcher = fetcher
        self._threads = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "media")
        self.counts = ImageCounters()
        self._cache = _ProcessedImages(self.settings.cache_bytes)

    @property
    def image_token_id(self) -> int:
        return self.processor.image_token_id

    def place(
        self, ids: Sequence[int], images: Sequence[ProcessedImage], param: str
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """See ``put_images``."""
        own = self.processor
        return put_images(ids, images, own.image_token_id, param, own.place_id)

    async def read(self, messages: Any, param: str) -> list[ProcessedImage]:
        """The images in unchecked messages, in their order.

        Raises:
            InvalidRequest: a part is wrong, or there are too many.
        """
        try:
            parts = self.parts(messages, param)
            if not parts:
                return []
            self.counts.images.observe(len(parts))
            return await self._read(parts)
        except RayfinError as error:
            self.counts.refused(error.code)
            raise

    async def _read(self, parts: list[ImagePart]) -> list[ProcessedImage]:
        loop = asyncio.get_running_loop()
        rest = self.settings.max_total_bytes
        files: list[ImagePart] = []
        for part in parts:
            if part.url is not None:
                most = min(self.settings.max_bytes, rest)
                started = loop.time()
                data = await self._fetcher.fetch(part.url, part.param, most)
                self.counts.fetch.observe(loop.time() - started)
                part = replace(part, data=data)
            rest -= self._check_bytes(part, rest)
            files.append(part)
        work = (loop.run_in_executor(self._threads, self.process, part) for part in files)
        return list(await asyncio.gather(*work))

    def read_now(self, messages: Any, param: str) -> list[ProcessedImage]:
        """As ``read``, for callers without an event loop, or with one that is not to be used."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self.read(messages, param)).result()

    def parts(self, messages: Any, param: str) -> list[ImagePart]:
        """The image parts of unchecked messages.

        Raises:
            InvalidRequest: a part is wrong, or there are too many.
        """
        found: list[ImagePart] = []
        for i, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
            content = message.get("content") if isinstance(message, Mapping) else None
            for j, part in enumerate(content if isinstance(content, list) else ()):
                if is_image(part):
                    found.append(read_part(part, f"{param}[{i}].content[{j}]"))
        self.check_count(len(found), param)
        return found

    def check_count(self, count: int, param: str) -> None:
        """Raises:
        InvalidRequest: more images than a prompt may have.
        """
        if count > self.settings.max_images:
            raise InvalidRequest(
                f"A prompt has at most {self.settings.max_images} images here, got {count}.",
                param,
                "too_many_images",
            )

    def process(self, part: ImagePart) -> ProcessedImage:
        """Decodes and processes an image; the same bytes are processed once."""
        try:
            if part.picture is not None:
                return self._process(_picture(part))
            data = part.file()
            name = hashlib.sha256(data).digest()
            known = self._cache.get(name)
            if known is None:
                known = self._process(decode(data, self.settings.max_pixels, part.param))
                self._cache.add(name, known)
            return known
        except InvalidRequest as error:
            error.param = part.param
            raise

    def _process(self, picture: Image.Image) -> ProcessedImage:
        made = self.processor.process(picture)
        return made if self._put is None else replace(made, pixels=self._put(made.pixels))

    def _check_bytes(self, part: ImagePart, rest: int) -> int:
        size = part.size
        if size > min(rest, self.settings.max_bytes):
            raise InvalidRequest(
                f"'{part.param}' has {size} bytes; an image has at most "
                f"{self.settings.max_bytes}, and those of a request "
                f"{self.settings.max_total_bytes}.",
                part.param,
                "invalid_image",
            )
        return size

    def read_pictures(self, pictures: Sequence[Any], param: str) -> list[ProcessedImage]:
        """Processes pictures of Python's, for ``LLM``."""
        self.check_count(len(pictures), param)
        return [self.process(ImagePart(param, picture=picture)) for picture in pictures]


def _picture(part: ImagePart) -> Image.Image:
    if not isinstance(part.picture, Image.Image):
        raise InvalidRequest(
            f"'{part.param}' must be a PIL.Image.Image.", part.param, "invalid_type"
        )
    return to_rgb(part.picture)


class _ProcessedImages:
    """The images that were seen last, by the digest of their files."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: bytes) -> ProcessedImage | None:
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
            return found

    def add(self, name: bytes, image: ProcessedImage) -> None:
        with self._lock:
            if name in self._kept:
                return
            self._kept[name] = image
            self._bytes += image.num_bytes
            while self._bytes > self._max_bytes and self._kept:
                self._bytes -= self._kept.popitem(last=False)[1].num_bytes
