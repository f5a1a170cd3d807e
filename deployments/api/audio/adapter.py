"""POST /v1/audio/transcriptions and /v1/audio/translations."""

import json
import logging
import math
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from rayfin.actors.errors import RayfinError
from rayfin.actors.sampling_params import BeamSearchParams, SamplingParams
from rayfin.deployments.api.audio.form import SUBTITLES, AudioForm
from rayfin.deployments.api.audio.prompts import FILE, speech_prompt
from rayfin.deployments.api.audio.replies import (
    DurationUsage,
    SpeechChoice,
    SpeechDelta,
    TokenUsage,
    Transcript,
    TranscriptDelta,
    TranscriptDone,
    VerboseTranscript,
)
from rayfin.deployments.api.audio.transcript import HeardText, JoinedText
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import Deltas, Generation
from rayfin.deployments.generation.plan import AnswerRules, plan_text
from rayfin.deployments.generation.route import GenerationAdapter
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.errors import error_body
from rayfin.deployments.http.json_body import ignored_header, rename_error_params
from rayfin.deployments.http.sse import DONE, event
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.text.generation_prompt import ChatPrompt
from rayfin.deployments.text.output import TextDelta

logger = logging.getLogger("rayfin.http")

AT_ONCE = 8  # clips of a recording that run side by side
OBJECTS = {"transcribe": "transcription.chunk", "translate": "translation.chunk"}


class TranscriptionAdapter(GenerationAdapter):
    """One request to write down, or to translate, a recording: a choice for each clip of it.

    Args:
        media: the service's.
    """

    def __init__(self, service: OpenAIService, media: MediaReader, form: AudioForm) -> None:
        self._service, self._media, self._form = service, media, form
        self._place = media.room.place()
        self._frame: dict[str, Any] = {
            "id": f"trsc-{uuid.uuid4().hex}",
            "object": OBJECTS[form.task],
            "created": int(time.time()),
            "model": service.name,
        }
        self.streamed = form.stream
        if form.response_format in ("text", *SUBTITLES):
            self.media_type = "text/plain; charset=utf-8"

    async def prepare(self, request: Request) -> Generation:
        try:
            return await self._prepared(request)
        except BaseException:
            self._place.leave()
            raise

    async def _prepared(self, request: Request) -> Generation:
        form, service = self._form, self._service
        form.check_times(False)
        params, caller = self._params(), Caller.of(request)
        prompt = await speech_prompt(service, self._media, form, self._place)
        self._form = replace(form, data=b"")  # a stream may take minutes
        self._seconds = prompt.seconds
        known = form.language is not None or form.task == "translate"
        mark = "" if known else prompt.mark
        self._heard = JoinedText([HeardText(mark) for _ in prompt.clips])
        self._generation = await self._generate(prompt.clips, params, caller)
        unread = [*form.ignored, *form.listening, *prompt.unread]
        self._generation.headers |= ignored_header(unread)
        return self._generation

    def _params(self) -> SamplingParams:
        with rename_error_params({"max_tokens": "max_completion_tokens"}):
            return self._form.sampling_params(self._service.sampling_defaults)

    async def _generate(
        self,
        clips: Sequence[ChatPrompt],
        params: SamplingParams,
        caller: Caller,
        search: BeamSearchParams | None = None,
    ) -> Generation:
        """Returns the requests for the transcripts of clips."""
        salt = self._form.cache_salt
        with rename_error_params({"max_tokens": "max_completion_tokens"}):
            return await Generation.prepare(
                self._service,
                [Prompt(clip.ids, FILE, cache_salt=salt, images=clip.images) for clip in clips],
                params,
                request_id=str(self._frame["id"]),
                priority=0,
                caller=caller,
                search=search,
                plan=await plan_text(self._service, AnswerRules(), caller.tenant),
            )

    async def run(self, generation: Generation) -> Deltas:
        try:
            async with aclosing(generation.run(AT_ONCE)) as deltas:
                async for item in deltas:
                    yield item
        finally:
            self._place.leave()

    def discard(self) -> None:
        self._place.leave()

    def reply(self, generation: Generation) -> str:
        for choice in generation.choices:
            self._push(choice, "".join(choice.text), choice.token_ids, last=True)
        return self._answer(self._heard.text, self._heard.language)

    def _answer(self, text: str, language: str | None) -> str:
        """Returns the whole answer; ``language`` is what the model has heard."""
        form = self._form
        if form.response_format == "text":
            return text
        usage = DurationUsage(seconds=math.ceil(self._seconds))
        if form.response_format == "json":
            return Transcript(text=text, usage=usage).model_dump_json()
        verbose = VerboseTranscript(
            task=form.task,
            language=form.language or language,
            duration=self._seconds,
            text=text,
            usage=usage,
        )
        return self._verbose(verbose)

    def _verbose(self, answer: VerboseTranscript) -> str:
        return answer.model_dump_json()

    def _push(self, choice: Choice, text: str, token_ids: list[int], *, last: bool) -> str:
        """What an answer goes on with, and what that adds to the whole transcript."""
        return self._heard.push(choice.index, text, last=last)

    def events(self, choice: Choice, delta: TextDelta) -> list[str]:
        ended = delta.finish_reason is not None
        text = self._push(choice, delta.text, delta.token_ids, last=ended)
        if not text:
            return []
        written = SpeechChoice(delta=SpeechDelta(content=text))
        chunk = TranscriptDelta(**self._frame, choices=[written], delta=text)
        return [event(chunk.model_dump_json())]

    def closing(self) -> Iterable[str]:
        reasons = {choice.finish_reason for choice in self._generation.choices}
        reason = "length" if "length" in reasons else "stop"
        ended = SpeechChoice(delta=SpeechDelta(content=""), finish_reason=reason)
        used = self._generation.usage()
        usage = TokenUsage(
            input_tokens=used.prompt_tokens,
            output_tokens=used.completion_tokens,
            total_tokens=used.total_tokens,
            prompt_tokens=used.prompt_tokens,
            completion_tokens=used.completion_tokens,
        )
        text = self._heard.text
        done = TranscriptDone(**self._frame, choices=[ended], text=text, usage=usage)
        yield event(done.model_dump_json())
        yield DONE

    def failure(self, error: Exception) -> Iterable[str]:
        if not isinstance(error, RayfinError):
            logger.exception("A stream failed")
        yield event(json.dumps(error_body(error)))
        yield DONE
