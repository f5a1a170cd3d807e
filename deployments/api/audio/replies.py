"""Answers of the audio routes: OpenAI's objects, and in streams vLLM's members beside them."""

from typing import Literal

from pydantic import BaseModel

from rayfin.deployments.api.audio.segments import Segment
from rayfin.deployments.api.audio.transcript import Word


class DurationUsage(BaseModel):
    type: Literal["duration"] = "duration"
    seconds: int  # of the audio, rounded up


class Transcript(BaseModel):
    """``response_format`` json."""

    text: str
    usage: DurationUsage


class VerboseTranscript(BaseModel):
    """``response_format`` verbose_json, as far as it is known."""

    task: Literal["transcribe", "translate"]
    language: str | None  # as the request has it, or as the model has heard it
    duration: float  # seconds
    text: str
    usage: DurationUsage


class TimedTranscript(VerboseTranscript):
    """``response_format`` verbose_json of a model that gives times: those that are asked for."""

    words: list[Word] | None = None
    segments: list[Segment] | None = None


class SpeechDelta(BaseModel):
    content: str


class SpeechChoice(BaseModel):
    index: int = 0
    delta: SpeechDelta
    finish_reason: str | None = None


class SpeechChunk(BaseModel):
    """An event of a stream in vLLM's form; subclasses add OpenAI's members."""

    id: str
    object: str
    created: int
    model: str
    choices: list[SpeechChoice]


class TranscriptDelta(SpeechChunk):
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TokenUsage(BaseModel):
    type: Literal["tokens"] = "tokens"
    input_tokens: int
    output_tokens: int
    total_tokens: int
    prompt_tokens: int  # vLLM's name of input_tokens
    completion_tokens: int  # vLLM's name of output_tokens


class TranscriptDone(SpeechChunk):
    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: TokenUsage
