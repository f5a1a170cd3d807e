"""What a model is asked when it is to write down speech, or to translate it."""

from typing import Any, NamedTuple

from rayfin.actors.media.audio_processor import AudioProcessor, Transcription
from rayfin.deployments.api.audio.form import AudioForm
from rayfin.deployments.generation.prompts import chat_prompt
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.text.messages import PlacedPart
from rayfin.deployments.text.opening import ChatPrompt

FILE = "file"
TRANSLATE = "Translate the speech in this audio into {}. Answer with the translation alone."


class SpeechPrompt(NamedTuple):
    """A prompt around a clip, and the seconds of that."""

    chat: ChatPrompt
    seconds: float
    unread: tuple[str, ...] = ()  # fields of the form that such a prompt has no place for


async def speech_prompt(
    service: OpenAIService, media: MediaReader, form: AudioForm
) -> SpeechPrompt:
    """The prompt that asks for what the form wants.

    Raises:
        InvalidRequest: the file is no audio, too long, or does not fit.
    """
    assert isinstance(media.processor, AudioProcessor)
    own = media.processor.transcription
    part = PlacedPart({"type": "input_audio", "input_audio": form.data}, FILE)
    read = await media.read([{"role": "user", "content": [part]}], FILE)
    seconds = read[0].seconds
    if form.task == "transcribe" and own.text is not None:
        behind = own.language.format(form.language) if form.language else ""
        written = service.tokenizer.encode(own.text + behind + own.end, False)
        ids, inputs = media.place(written, read, FILE)
        unread = ("prompt",) if form.prompt else ()
        return SpeechPrompt(ChatPrompt(ids, images=inputs), seconds, unread)
    said: list[Any] = [part, {"type": "text", "text": _instruction(form, own)}]
    content = said if own.audio_first else said[::-1]
    messages = [{"role": "user", "content": content}]
    return SpeechPrompt(await chat_prompt(service, messages, FILE, read=read), seconds)


def _instruction(form: AudioForm, own: Transcription) -> str:
    text = own.instruction
    if form.task == "translate":
        text = TRANSLATE.format(form.to_language or "English")
    if form.language:
        text += f" The language of the speech is {form.language}."
    return f"{text}\n{form.prompt}" if form.prompt else text
