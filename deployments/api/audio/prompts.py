"""What a model is asked when it is to write down speech, or to translate it."""

import asyncio
from typing import Any, NamedTuple

from jinja2 import TemplateError

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.audio_processor import AudioProcessor, Transcription
from rayfin.deployments.api.audio.form import AudioForm
from rayfin.deployments.generation.prompts import chat_ids
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.media.memory_limit import RecordingPlace
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.text.generation_prompt import ChatPrompt
from rayfin.deployments.text.messages import PlacedPart
from rayfin.deployments.text.tokenizer import Tokenizer

FILE = "file"
TRANSLATE = "Translate the speech in this audio into {}. Answer with the translation alone."


class SpeechPrompt(NamedTuple):
    """A prompt around each clip of a recording."""

    clips: list[ChatPrompt]
    lengths: list[float]  # of the clips, seconds
    mark: str = ""  # in answers: what is before it is the language
    unread: tuple[str, ...] = ()  # fields of the form that such a prompt has no place for

    @property
    def seconds(self) -> float:
        """Of the recording."""
        # A sum of floats may be over a whole second by its last bit, and seconds are rounded up.
        return round(sum(self.lengths), 3)


async def speech_prompt(
    service: OpenAIService, media: MediaReader, form: AudioForm, place: RecordingPlace
) -> SpeechPrompt:
    """The prompts that ask for what the form wants, one for each clip.

    Raises:
        InvalidRequest: the file is no audio, too long, or does not fit.
        Overloaded: other recordings hold too much.
    """
    assert isinstance(media.processor, AudioProcessor)
    transcription = media.processor.transcription
    unread: tuple[str, ...] = ()
    if form.task == "transcribe" and transcription.write is not None:
        # A template and a tokenizer take milliseconds for a long hint.
        ids = await asyncio.to_thread(_own_form, service, form, transcription)
        unread = ("prompt",) if form.prompt and not transcription.takes_hint else ()
    else:
        ids = await _chat_form(service, form, transcription)
    read = await media.read_recording(form.data, FILE, place)
    clips = [ChatPrompt(*media.place(ids, [clip], FILE)) for clip in read]
    return SpeechPrompt(clips, [clip.seconds for clip in read], transcription.mark, unread)


async def _chat_form(
    service: OpenAIService, form: AudioForm, transcription: Transcription
) -> list[int]:
    """The tokens of a chat with an instruction, and with the place of a clip."""
    said: list[Any] = [
        PlacedPart({"type": "input_audio"}, FILE),
        {"type": "text", "text": _instruction(form, transcription)},
    ]
    content = said if transcription.audio_first else said[::-1]
    return await chat_ids(service, [{"role": "user", "content": content}], FILE, read=[])


def _own_form(service: OpenAIService, form: AudioForm, transcription: Transcription) -> list[int]:
    """The tokens of a prompt in the model's own form, with the place of a clip.

    Raises:
        InvalidRequest: the model does not know the language, or the hint holds a control token or
            a tag that a model writes itself.
    """
    assert transcription.write is not None
    hint, tokenizer = form.prompt if transcription.takes_hint else "", service.tokenizer
    check_hint(tokenizer, hint)
    try:
        return tokenizer.encode(transcription.write(form.language, hint), False)
    except (ValueError, TemplateError) as error:
        reason, name = str(error).partition("\n")[0], "language" if form.language else "prompt"
        raise InvalidRequest(f"{name}: {reason}", name, "invalid_value") from error


def check_hint(tokenizer: Tokenizer, hint: str) -> None:
    """Raises:
    InvalidRequest: a hint that stands in a model's own form has a control token, or a tag that a
        model writes itself.
    """
    if tokenizer.control_tokens.search(hint) or tokenizer.paired_tags.search(hint):
        raise InvalidRequest("prompt may not hold control tokens.", "prompt", "invalid_value")


def _instruction(form: AudioForm, transcription: Transcription) -> str:
    text = transcription.instruction
    if form.task == "translate":
        text = TRANSLATE.format(form.to_language or "English")
    if form.language:
        text += f" The language of the speech is {form.language}."
    return f"{text}\n{form.prompt}" if form.prompt else text
