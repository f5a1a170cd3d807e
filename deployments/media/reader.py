"""Images or clips of one request: fetched, decoded and processed, never on the event loop."""

import asyncio
import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rayfin.actors.errors import InvalidRequest, RayfinError
from rayfin.actors.media.audio_processor import AudioProcessor, Samples
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.part import MediaInput
from rayfin.actors.media.processed import WORDS, MediaProcessor, ProcessedMedia, put_media
from rayfin.deployments.media.decode import Pictures
from rayfin.deployments.media.memory_limit import RecordingPlace, RecordingRoom
from rayfin.deployments.media.parts import A, MediaPart, read_part
from rayfin.deployments.media.settings import MediaSettings
from rayfin.deployments.media.sound import Clips, cut_at_quiet
from rayfin.deployments.media.speech import Recording, find_speech
from rayfin.deployments.telemetry.ingress_counters import MediaCounters
from rayfin.deployments.text.messages import media_of

if TYPE_CHECKING:  # which import transformers, and an HTTP client
    from rayfin.actors.media.whisper import SpeechPrompts
    from rayfin.deployments.media.fetch import MediaFetcher

T = TypeVar("T")


class MediaReader:
    """Reads the images or clips of requests for one model. Threads and tasks may share it.

    Args:
        processor: the model's.
        put: what an engine gets in place of the arrays, a Ray reference say.
        off: why requests may have none; None: they may.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        settings: MediaSettings | None = None,
        put: Callable[[Any], Any] | None = None,
        fetcher: "MediaFetcher | None" = None,
        off: str | None = None,
    ) -> None:
        self.processor, self.off = processor, off
        self.settings = settings or MediaSettings()
        self._open: Pictures | Clips = Pictures(self.settings)
        if isinstance(processor, AudioProcessor):
            self._open = Clips(self.settings, processor.rate)
        self._put = put
        if fetcher is None:
            from rayfin.deployments.media.fetch import MediaFetcher

            fetcher = MediaFetcher(self.settings)
        self._fetcher = fetcher
        count = min(4, os.cpu_count() or 1)
        self._threads = ThreadPoolExecutor(count, "media")
        self._recordings = ThreadPoolExecutor(count, "recordings")  # each may take many seconds
        self.room = RecordingRoom(self.settings.max_held_bytes)
        self.counts = MediaCounters()
        self._cache = _Processed(self.settings.cache_bytes)

    @property
    def kind(self) -> MediaKind:
        """What the model reads beside text."""
        return self.processor.kind

    @property
    def speech(self) -> "SpeechPrompts | None":
        """The prompts of a model that does nothing but write down speech (Whisper)."""
        processor = self.processor
        return processor.transcription.speech if isinstance(processor, AudioProcessor) else None

    @property
    def media_token_id(self) -> int:
        return self.processor.media_token_id

    def place(
        self, ids: Sequence[int], media: Sequence[ProcessedMedia], param: str
    ) -> tuple[list[int], tuple[MediaInput, ...]]:
        """See ``put_media``."""
        processor = self.processor
        return put_media(
            ids, media, processor.media_token_id, param, processor.place_id, processor.kind
        )

    async def read(self, messages: Any, param: str) -> list[ProcessedMedia]:
        """The images or clips in unchecked messages, in their order.

        Raises:
            InvalidRequest: a part is wrong, or there are too many.
        """
        try:
            parts = self.parts(messages, param)
            if not parts:
                return []
            if self.off is not None:
                raise InvalidRequest(
                    f"This server takes no {WORDS[self.kind][1]}: {self.off}.",
                    parts[0].param,
                    "unsupported_content",
                )
            self.counts.images.observe(len(parts))
            return await self._read(parts)
        except RayfinError as error:
            self.counts.refused(error.code)
            raise

    async def _read(self, parts: list[MediaPart]) -> list[ProcessedMedia]:
        loop = asyncio.get_running_loop()
        rest = self.settings.max_total_bytes
        files: list[MediaPart] = []
        for part in parts:
            if part.url is not None:
                max_bytes = min(self.settings.max_bytes, rest)
                started = loop.time()
                data = await self._fetcher.fetch(part.url, part.param, max_bytes)
                self.counts.fetch.observe(loop.time() - started)
                part = replace(part, data=data)
            rest -= self._check_bytes(part, rest)
            files.append(part)
        work = (loop.run_in_executor(self._threads, self.process, part) for part in files)
        return list(await asyncio.gather(*work))

    async def read_recording(
        self, data: bytes, param: str, place: RecordingPlace
    ) -> list[ProcessedMedia]:
        """A recording as clips in order, each as long as the model hears well, or shorter.

        Args:
            place: of ``room``; when this returns it holds what the clips have.

        Raises:
            InvalidRequest: it is no audio, too long, or too short for a token.
            Overloaded: other recordings hold too much.
        """

        def read(gone: threading.Event) -> list[ProcessedMedia]:
            processor = self.processor
            assert isinstance(self._open, Clips) and isinstance(processor, AudioProcessor)
            blocks = self._open.recording(data, param)
            windows = cut_at_quiet(blocks, processor.rate, self._window_seconds())
            return self._processed(windows, place, gone)

        return await self._on_thread(read, param, place, len(data))

    async def read_speech(
        self, data: bytes, param: str, place: RecordingPlace, *, skip: bool
    ) -> Recording:
        """Returns a whole recording for a model that hears speech alone.

        Args:
            place: of ``room``; when this returns it holds what the recording has.
            skip: silence is skipped.

        Raises:
            InvalidRequest: it is no audio, or too long.
            Overloaded: other recordings hold too much.
        """

        def read(gone: threading.Event) -> Recording:
            processor, blocks = self.processor, [np.zeros(0, np.float32)]
            assert isinstance(self._open, Clips) and isinstance(processor, AudioProcessor)
            for block in self._open.recording(data, param):
                if gone.is_set():
                    break
                place.take(block.nbytes)
                blocks.append(block)
            samples = np.concatenate(blocks)
            window = int(self._window_seconds() * processor.rate)
            return Recording(
                samples, processor.rate, window, find_speech(samples) if skip else None
            )

        return await self._on_thread(read, param, place, len(data))

    async def clips(
        self, windows: Iterable[Samples], param: str, place: RecordingPlace
    ) -> list[ProcessedMedia]:
        """Returns the clips of windows of a recording; ``place`` then holds what they have, too.

        Raises:
            InvalidRequest, Overloaded: as ``read_recording``.
        """

        def read(gone: threading.Event) -> list[ProcessedMedia]:
            return self._processed(windows, place, gone)

        return await self._on_thread(read, param, place)

    async def clip(self, window: Samples) -> ProcessedMedia:
        """Returns the clip of one window, which is soon gone."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._recordings, self._process, window)

    async def _on_thread(
        self,
        work: Callable[[threading.Event], T],
        param: str,
        place: RecordingPlace,
        file_bytes: int = 0,
    ) -> T:
        """Runs ``work`` of a recording, which may take long, until it is gone."""
        gone = threading.Event()  # its client
        try:
            if file_bytes:
                self.counts.images.observe(1)
            place.take(file_bytes)
            loop = asyncio.get_running_loop()
            result = await loop.run_in_executor(self._recordings, work, gone)
            place.take(-file_bytes)
            return result
        except RayfinError as error:
            self.counts.refused(error.code)
            if isinstance(error, InvalidRequest):
                error.param = param
            raise
        finally:
            gone.set()

    def _processed(
        self, windows: Iterable[Samples], place: RecordingPlace, gone: threading.Event
    ) -> list[ProcessedMedia]:
        media: list[ProcessedMedia] = []
        for clip in windows:
            if gone.is_set():
                return []
            media.append(self._process(clip))
            place.take(media[-1].num_bytes)
        return media

    def _window_seconds(self) -> float:
        """Of a recording that is heard at once."""
        processor, settings = self.processor, self.settings
        assert isinstance(processor, AudioProcessor)
        seconds = min(settings.chunk_seconds or processor.window_seconds, settings.max_seconds)
        return seconds if processor.max_seconds is None else min(seconds, processor.max_seconds)

    def read_now(self, messages: Any, param: str) -> list[ProcessedMedia]:
        """As ``read``, for callers without an event loop, or with one that is not to be used."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self.read(messages, param)).result()

    def parts(self, messages: Any, param: str) -> list[MediaPart]:
        """Their parts of unchecked messages.

        Raises:
            InvalidRequest: a part is wrong, or there are too many.
        """
        parts: list[MediaPart] = []
        for i, message in enumerate(messages if isinstance(messages, list | tuple) else ()):
            content = message.get("content") if isinstance(message, Mapping) else None
            for j, part in enumerate(content if isinstance(content, list) else ()):
                if media_of(part) == self.kind:
                    parts.append(read_part(part, f"{param}[{i}].content[{j}]"))
        self.check_count(len(parts), param)
        return parts

    def check_count(self, count: int, param: str) -> None:
        """Raises:
        InvalidRequest: more of them than a prompt may have.
        """
        limit = self.settings.limit(self.kind)
        if count > limit:
            raise InvalidRequest(
                f"A prompt has at most {limit} {WORDS[self.kind][1]} here, got {count}.",
                param,
                f"too_many_{self.kind}s",
            )

    def process(self, part: MediaPart) -> ProcessedMedia:
        """Decodes and processes an image or clip; the same bytes are processed once."""
        try:
            if part.given is not None:
                return self._process(self._open.given(part.given, part.param))
            data = part.file()
            name = hashlib.sha256(data).digest()
            known = self._cache.get(name)
            if known is None:
                known = self._process(self._open.decode(data, part.param))
                self._cache.add(name, known)
            return known
        except InvalidRequest as error:
            error.param = part.param
            raise

    def _process(self, opened: Any) -> ProcessedMedia:
        media = self.processor.process(opened)
        return media if self._put is None else replace(media, arrays=self._put(media.arrays))

    def _check_bytes(self, part: MediaPart, rest: int) -> int:
        size = part.size
        if size > min(rest, self.settings.max_bytes):
            raise InvalidRequest(
                f"'{part.param}' has {size} bytes; {A[part.kind]} has at most "
                f"{self.settings.max_bytes}, and those of a request "
                f"{self.settings.max_total_bytes}.",
                part.param,
                f"invalid_{part.kind}",
            )
        return size

    def read_given(self, given: Sequence[Any], param: str) -> list[ProcessedMedia]:
        """Processes pictures or samples of Python's, for ``LLM``."""
        self.check_count(len(given), param)
        return [self.process(MediaPart(param, self.kind, given=one)) for one in given]


class _Processed:
    """The images or clips that were seen last, by the digest of their files."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._kept: OrderedDict[bytes, ProcessedMedia] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: bytes) -> ProcessedMedia | None:
        with self._lock:
            media = self._kept.get(name)
            if media is not None:
                self._kept.move_to_end(name)
            return media

    def add(self, name: bytes, one: ProcessedMedia) -> None:
        with self._lock:
            if name in self._kept:
                return
            self._kept[name] = one
            self._bytes += one.num_bytes
            while self._bytes > self._max_bytes and self._kept:
                self._bytes -= self._kept.popitem(last=False)[1].num_bytes
