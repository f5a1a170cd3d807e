"""What a Whisper model is asked: control tokens behind each clip, in the language of the speech."""

import asyncio
import time
from typing import TYPE_CHECKING

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.audio.form import AudioForm
from rayfin.deployments.api.audio.language import LanguageFinder
from rayfin.deployments.api.audio.prompts import FILE, SpeechPrompt, check_hint
from rayfin.deployments.media.memory_limit import RecordingPlace
from rayfin.deployments.text.generation_prompt import ChatPrompt
from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # which imports transformers
    from rayfin.actors.media.whisper import SpeechPrompts

ENGLISH = "en"


async def whisper_prompt(
    form: AudioForm, place: RecordingPlace, finder: LanguageFinder
) -> SpeechPrompt:
    """The prompts that ask for what the form wants, one for each clip.

    Args:
        finder: asks for the language of a recording whose form has none.

    Raises:
        InvalidRequest: the file is no audio or too long, or the model cannot do what the form
            wants.
        RayfinError: the request for the language has failed.
    """
    media, tokenizer = finder.media, finder.service.tokenizer
    speech = media.speech
    assert speech is not None
    _check(form, speech, tokenizer)

    async def ask(language: str) -> list[int]:
        return await asyncio.to_thread(_ids, form, speech, language)  # milliseconds for a long hint

    language, spent = form.language or ENGLISH, 0.0
    ids = await ask(language)  # before a file is read: whatever its language, it may be refused
    clips = await media.read_recording(form.data, FILE, place)
    if form.language is None and speech.hears_languages:
        begun = time.monotonic()
        language = await finder.find(clips[0])
        spent = time.monotonic() - begun
        ids = await ask(language)
    return SpeechPrompt(
        [ChatPrompt(*media.place(ids, [clip], FILE)) for clip in clips],
        [clip.seconds for clip in clips],
        unread=("prompt",) if form.prompt and speech.tokens.before is None else (),
        language=language,
        spent=spent,
    )


def _check(form: AudioForm, speech: "SpeechPrompts", tokenizer: Tokenizer) -> None:
    check_hint(tokenizer, form.prompt)
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


def _ids(form: AudioForm, speech: "SpeechPrompts", language: str) -> list[int]:
    try:
        return speech.ask(language, form.task, form.prompt, times=form.wants_times)
    except ValueError as error:
        raise InvalidRequest(f"language: {error}", "language", "invalid_value") from error
