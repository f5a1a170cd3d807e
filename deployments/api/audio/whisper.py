"""Transcripts of Whisper models: windows of a recording, in its language, tried again if bad.

With times the windows follow one another: each begins where the last whole sentence of the one
before has ended. Without, clips run side by side.

Source: Radford et al., 2022, "Robust Speech Recognition via Large-Scale Weak Supervision", 4.5.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import Request

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.part import MediaFacts
from rayfin.actors.media.processed import ProcessedMedia
from rayfin.actors.sampling_params import BeamSearchParams, SamplingParams
from rayfin.deployments.api.audio.adapter import AT_ONCE, TranscriptionAdapter
from rayfin.deployments.api.audio.asking import Asker
from rayfin.deployments.api.audio.hearing import Heard, read_answer, segments
from rayfin.deployments.api.audio.prompts import FILE, check_hint
from rayfin.deployments.api.audio.replies import TimedTranscript, VerboseTranscript
from rayfin.deployments.api.audio.segments import Segment, Sentences, srt, vtt
from rayfin.deployments.api.audio.transcript import (
    HeardText,
    JoinedText,
    SpokenText,
    Word,
    words_of,
)
from rayfin.deployments.generation.choice import Choice
from rayfin.deployments.generation.generation import Deltas, Generation
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.http.json_body import ignored_header, rename_error_params
from rayfin.deployments.media.speech import speech_off
from rayfin.deployments.text.generation_prompt import ChatPrompt

if TYPE_CHECKING:  # which imports transformers
    from rayfin.actors.media.whisper import SpeechPrompts

ENGLISH = "en"
TRIES = (0.2, 0.4, 0.6, 0.8, 1.0)  # temperatures, behind 0
BEAMS = 5  # of the first try, where there is room for them
BEST_OF = 5  # transcripts of such a try, of which the likeliest counts
FORGETS = 0.5  # above this temperature a text is no hint for the next window
MORE = 0.3  # seconds of speech behind the last sentence that are worth a window ...
MISSED = 1.0  # ... and these even where the model says that it has heard all


class WhisperAdapter(TranscriptionAdapter):
    """One request to write down, or to translate, a recording with a Whisper model."""

    async def _prepared(self, request: Request) -> Generation:
        form, service, speech = self._form, self._service, self._speech
        self._listening = form.check_listening()
        form.check_times(True)
        self._check()
        params, caller = self._params(), Caller.of(request)
        self._in_turn = form.wants_times or self._listening.needs_turns is not None
        scored = replace(params, logprobs=0, logprobs_mode="raw_logprobs")
        self._params_of_windows = params if form.stream else scored
        self._search = await self._beams(params)
        self._asker = Asker(service, self._media, caller, str(self._frame["id"]), form.cache_salt)
        # Before a file is read: whatever its language, it may be refused.
        self._language: str | None = form.language or ENGLISH
        await self._ids()
        await self._read()
        if form.language is None and speech.hears_languages:
            self._language = None
            if self._clips:
                self._language = await self._asker.language(self._clips[0])
        prompts = [self._placed(await self._ids(), clip) for clip in self._clips]
        self._listen()
        caller, windows = self._asker.caller(), self._params_of_windows
        self._generation = await self._generate(prompts, windows, caller, self._search)
        unread = ["prompt"] if form.prompt and speech.tokens.before is None else []
        self._generation.headers |= ignored_header([*form.ignored, *unread])
        return self._generation

    @property
    def _speech(self) -> "SpeechPrompts":
        speech = self._media.speech
        assert speech is not None
        return speech

    async def _read(self) -> None:
        """Reads the file, and makes the clips of the windows whose places are known."""
        off, wanted = await asyncio.to_thread(speech_off), self._listening.vad_filter
        if wanted and off is not None:
            raise InvalidRequest(f"vad_filter: {off}.", "vad_filter", "unsupported_value")
        skip = off is None and wanted is not False
        data, self._form = self._form.data, replace(self._form, data=b"")
        recording = await self._media.read_speech(data, FILE, self._place, skip=skip)
        self._recording, self._seconds = recording, recording.seconds
        if self._in_turn:
            self._windows = [
                (start, recording.samples[start:end][: recording.window])
                for start, end in recording.parts[:1]
            ]
        else:
            self._windows = list(recording.windows())
        samples = [clip for _, clip in self._windows]
        self._clips = await self._media.clips(samples, FILE, self._place)

    async def _beams(self, params: SamplingParams) -> BeamSearchParams | None:
        """The search that is the first try; None: one transcript, greedy unless it is drawn.

        Raises:
            InvalidRequest: the engine has no room for the beams, or the form has another rule.
        """
        name, width = "beam_size", self._listening.beam_size
        info = await self._service.client.info()
        facts = info.part(MediaFacts)
        assert facts is not None
        beam_pages = -(-(info.max_model_len - facts.front_tokens) // info.page_size) + 1
        room = min(
            info.max_rows, (info.num_pages - facts.front_tokens // info.page_size) // beam_pages
        )
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1
        free = not any((params.temperature, params.min_p, *penalties))
        if width is None:
            width = max(1, min(BEAMS, room)) if self._in_turn and free else 1
        if width == 1:
            return None
        if not free:
            raise InvalidRequest(f"{name} does not go with a temperature or a penalty.", name)
        if width > room:
            raise InvalidRequest(f"{name} must be at most {room} here, got {width}.", name)
        with rename_error_params({"beam_width": name}):
            return BeamSearchParams(width, params.max_tokens)

    def _listen(self) -> None:
        """Makes what reads the answers."""
        speech, tokenizer = self._speech, self._service.tokenizer
        self._answers: list[Heard] = []
        self._heard = JoinedText([HeardText("") for _ in self._clips], strip=True)
        self._spoken = [SpokenText(tokenizer, speech.tokens.first_time) for _ in self._clips]

    async def run(self, generation: Generation) -> Deltas:
        try:
            async with aclosing(generation.run(AT_ONCE)) as deltas:
                async for item in deltas:
                    yield item
            if self._in_turn:
                await self._hear_in_turn(generation)
            elif not self.streamed:
                for choice, clip, (start, samples) in zip(
                    generation.choices, self._clips, self._windows, strict=True
                ):
                    self._answers.append(await self._hear(start, len(samples), clip, (), choice))
        finally:
            self._place.leave()

    async def _hear_in_turn(self, generation: Generation) -> None:
        """Windows that begin where the last whole sentence has ended."""
        recording, rate, before = self._recording, self._recording.rate, list[int]()
        known = list(zip(generation.choices, self._clips, strict=True))
        for start, end in recording.parts:
            while True:
                length = min(recording.window, end - start)
                choice, clip = known.pop() if known else (None, None)
                if clip is None:
                    clip = await self._media.clip(recording.samples[start : start + length])
                heard = await self._hear(start, length, clip, before, choice)
                if self._form.wants_words:
                    heard.words = await self._words(heard, clip)
                self._answers.append(heard)
                if self._listening.condition_on_previous_text is not False:
                    before = [] if heard.temperature > FORGETS else [*before, *heard.spoken]
                start += self._step(heard, start, length)
                rest = recording.spoken(start, end)
                if (end - start) / rate < MORE or (rest is not None and rest < MORE):
                    break

    async def _words(self, heard: Heard, clip: ProcessedMedia) -> list[Word]:
        first_time = self._speech.tokens.first_time
        tokens = [token for token in heard.spoken if token < first_time]
        if not tokens:
            return []
        ids = [*self._ask("", (), times=False), *tokens]
        times = await self._asker.times(ids, len(tokens), clip, heard.length)
        return words_of(tokens, times, heard.begin, self._service.tokenizer)

    def _step(self, heard: Heard, start: int, length: int) -> int:
        """Samples from a window's begin to that of the next one."""
        recording = self._recording
        step = min(max(int(heard.whole.end * recording.rate), int(MORE * recording.rate)), length)
        if heard.whole.goes_on:
            return step
        missed = recording.spoken(start + step, start + length)
        return length if missed is None or missed < MISSED else step

    async def _hear(
        self,
        start: int,
        length: int,
        clip: ProcessedMedia,
        before: Sequence[int],
        choice: Choice | None,
    ) -> Heard:
        """Returns the best transcript of a window.

        Args:
            before: tokens of what was said before, as a hint.
            choice: the first try, if it has been made.
        """
        params, listening = self._params_of_windows, self._listening
        place = start / self._recording.rate, length / self._recording.rate
        ids, tries, no_speech = await self._ids(before), list[Heard](), None
        for temperature in (params.temperature, *(() if params.temperature else TRIES)):
            if choice is None:
                asked = _hotter(params, temperature) if tries else params
                search = None if tries else self._search
                choice = await self._asker.transcript(ids, clip, asked, search)
            heard = read_answer(
                choice,
                *place,
                temperature,
                self._speech,
                self._service.tokenizer,
                times=self._in_turn,
            )
            tries.append(heard)
            choice, good = None, heard.good(listening)
            if no_speech is None and (not good or self._form.response_format == "verbose_json"):
                no_speech = await self._asker.no_speech(ids, clip)
            heard.no_speech_prob = no_speech or 0.0
            if heard.silent(listening):
                return replace(heard, text="", whole=Sentences([], heard.length, False))
            if good:
                return heard
        limit = listening.compression_ratio_threshold
        plain = [heard for heard in tries if heard.compression_ratio <= limit]
        return max(plain or tries, key=lambda heard: heard.avg_logprob)

    def reply(self, generation: Generation) -> str:
        heard = JoinedText([HeardText("") for _ in self._answers], strip=True)
        for place, answer in enumerate(self._answers):
            heard.push(place, answer.text, last=True)
        if self._form.response_format == "srt":
            return srt(self._segments())
        if self._form.response_format == "vtt":
            return vtt(self._segments())
        return self._answer(heard.text, self._language)

    def _segments(self) -> list[Segment]:
        return segments(self._answers, self._speech, self._service.tokenizer)

    def _verbose(self, answer: VerboseTranscript) -> str:
        words = [word for heard in self._answers for word in heard.words]
        timed = TimedTranscript(**dict(answer), words=words, segments=self._segments())
        left_out = {"words": not self._form.wants_words, "segments": not self._form.wants_segments}
        return timed.model_dump_json(exclude={name for name, out in left_out.items() if out})

    def _push(self, choice: Choice, text: str, token_ids: list[int], *, last: bool) -> str:
        text = self._spoken[choice.index].push(token_ids, last=last)
        return super()._push(choice, text, token_ids, last=last)

    def _placed(self, ids: list[int], clip: ProcessedMedia) -> ChatPrompt:
        return ChatPrompt(*self._media.place(ids, [clip], FILE))

    async def _ids(self, before: Sequence[int] = ()) -> list[int]:
        """Returns the tokens that ask for a transcript behind those of the one before."""
        # It takes milliseconds for a long hint.
        return await asyncio.to_thread(self._ask, self._form.prompt, before, times=self._in_turn)

    def _ask(self, hint: str, before: Sequence[int], *, times: bool) -> list[int]:
        language, task = self._language or ENGLISH, self._form.task
        try:
            return self._speech.ask(language, task, hint, times=times, before=before)
        except ValueError as error:
            raise InvalidRequest(f"language: {error}", "language", "invalid_value") from error

    def _check(self) -> None:
        form, speech = self._form, self._speech
        check_hint(self._service.tokenizer, form.prompt)
        if form.task != "translate":
            return
        if not speech.tokens.tasks:
            raise InvalidRequest(
                "This model writes down English only, and does not translate.",
                "model",
                "invalid_value",
            )
        into = form.to_language
        if into is not None and speech.plain_code(into) != ENGLISH:
            raise InvalidRequest(
                f"to_language must be English, got {into!r}: this model translates into no other "
                "language.",
                "to_language",
                "invalid_value",
            )


def _hotter(params: SamplingParams, temperature: float) -> SamplingParams:
    """Settings of another try; the same recording gives the same text again."""
    seed = params.seed or 0
    return replace(params, temperature=temperature, seed=seed, best_of=BEST_OF)
