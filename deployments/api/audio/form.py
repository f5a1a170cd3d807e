"""The form of a request to write down speech: OpenAI's fields, and vLLM's beside them."""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, cast, get_args

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from rayfin.actors.errors import ClientGone, InvalidRequest
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.bodies import GenerationBody
from rayfin.deployments.generation.prompt_forms import SALT, check_salt
from rayfin.deployments.http.body_limits import CLOSE, RECORDING_FORM_BYTES

Task: TypeAlias = Literal["transcribe", "translate"]
ResponseFormat: TypeAlias = Literal["json", "text", "verbose_json", "srt", "vtt"]

MAX_FIELDS = 64
MAX_FIELD_BYTES = 64 * 1024
MAX_HINT = 8192  # characters of ``prompt``
LANGUAGE = re.compile(r"[A-Za-z]{2,32}(-[A-Za-z0-9]{1,8})*")
FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty")
NUMBERS: dict[str, type[int] | type[float]] = {
    **dict.fromkeys((*FLOATS, "repetition_penalty"), float),
    **dict.fromkeys(("top_k", "seed", "max_completion_tokens"), int),
}
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
WORDS = ("model", "language", "to_language", "prompt", "response_format")
SWITCHES = ("stream", "stream_include_usage", "stream_continuous_usage_stats")
LIMITS = ("compression_ratio_threshold", "log_prob_threshold", "no_speech_threshold")
LISTENING: dict[str, type[bool] | type[int] | type[float]] = {
    **dict.fromkeys(("vad_filter", "condition_on_previous_text"), bool),
    **dict.fromkeys(LIMITS, float),
    "beam_size": int,
}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number"}
GRANULARITIES = ("timestamp_granularities[]", "timestamp_granularities")
LOGPROBS = ("include[]", "include")
LISTS = (*GRANULARITIES, *LOGPROBS)
SUBTITLES = ("srt", "vtt")

TEXT = {"type": "string"}
SPEECH: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "response_format": {"enum": list(get_args(ResponseFormat))},
        **dict.fromkeys((name for name in (*WORDS, SALT) if name != "response_format"), TEXT),
        **{name: {"type": JSON_TYPES[kind]} for name, kind in (NUMBERS | LISTENING).items()},
        GRANULARITIES[0]: {"type": "array", "items": {"enum": ["segment", "word"]}},
        **dict.fromkeys(SWITCHES, {"type": "boolean"}),
    },
}
"""The form of both routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """How a Whisper model listens, by the names that faster-whisper has for it."""

    vad_filter: bool | None = None  # silence is skipped; None: where the package for it is there
    # What was said before is a hint; None: where windows follow one another.
    condition_on_previous_text: bool | None = None
    beam_size: int | None = None  # of the first try; None: 5 where windows follow one another
    compression_ratio_threshold: float = 2.4  # a text that is more repetitive is tried again ...
    log_prob_threshold: float = -1.0  # ... and one whose tokens are less likely on average
    no_speech_threshold: float = 0.6  # less likely, and no speech more probable: it is silence

    @property
    def needs_turns(self) -> str | None:
        """Returns the field that makes windows follow one another, where nothing else does."""
        if self.condition_on_previous_text:
            return "condition_on_previous_text"
        return "beam_size" if (self.beam_size or 1) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioForm:
    """A request to write down speech."""

    task: Task
    data: bytes  # of the file
    model: str | None = None
    language: str | None = None  # of the speech
    to_language: str | None = None  # of a translation; None: English
    prompt: str = ""  # a hint of the client's
    response_format: ResponseFormat = "json"
    granularities: list[tuple[str, str]]  # names of fields, and what they ask for
    stream: bool = False
    cache_salt: str | None = None  # pages are shared only among prompts with the same salt
    numbers: dict[str, int | float]
    listening: dict[str, Any] = field(default_factory=dict)  # those fields of it that are given
    ignored: list[str]

    @property
    def wants_words(self) -> bool:
        """Returns whether the answer has the times of words."""
        return any(asked == "word" for _, asked in self.granularities)

    @property
    def wants_segments(self) -> bool:
        """Whether an answer with times has segments: OpenAI leaves them out beside words."""
        return not self.granularities or any(asked == "segment" for _, asked in self.granularities)

    @property
    def wants_times(self) -> bool:
        """Whether the answer has times, if the model gives some."""
        return self.response_format in ("verbose_json", *SUBTITLES)

    def check_times(self, gives_times: bool) -> None:
        """
        Args:
            gives_times: the model does, of segments.

        Raises:
            InvalidRequest: the form asks for times that the model does not give.
        """
        if not gives_times and self.response_format in SUBTITLES:
            raise InvalidRequest(
                f"response_format must be one of json, text, verbose_json, got "
                f"{self.response_format!r}: this model gives no times.",
                "response_format",
                "unsupported_value",
            )
        for name, asked in self.granularities:
            if not gives_times:
                raise InvalidRequest(
                    f"{name} is not supported: this model gives no times.",
                    name,
                    "unsupported_parameter",
                )
            if asked not in ("segment", "word"):
                raise InvalidRequest(
                    f"{name} must be 'segment' or 'word', got {asked[:32]!r}.",
                    name,
                    "unsupported_value",
                )
            if self.response_format != "verbose_json":
                raise InvalidRequest(
                    f"{name} needs response_format verbose_json.", name, "unsupported_value"
                )

    def check_listening(self) -> Listening:
        """Returns how a Whisper model is to listen.

        Raises:
            InvalidRequest: a stream is to have what windows that run side by side have not.
        """
        listening = Listening(**self.listening)
        if self.stream and (name := listening.needs_turns) is not None:
            raise InvalidRequest(
                f"{name} does not go with stream: clips of a stream run side by side.",
                name,
                "unsupported_value",
            )
        return listening

    def sampling_params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The sampling settings: greedy, unless the form has a temperature.

        Raises:
            InvalidRequest: a value is out of range.
        """
        numbers: dict[str, Any] = {"temperature": 0.0, **self.numbers}
        limit = numbers.pop("max_completion_tokens", None)
        return GenerationBody(**numbers).sampling_params(defaults, limit)


async def read_form(
    request: Request, task: Task, max_bytes: int, check: Callable[[str], Awaitable[Any]]
) -> AudioForm:
    """The fields of a multipart form.

    A file that is too large is refused by its Content-Length, or while it comes.

    Args:
        max_bytes: of the file.
        check: refuses the name of a model, as soon as it is there.

    Raises:
        HTTPException: 413 too large, 415 another media type, 400 no form.
        InvalidRequest: a field is missing, is there twice, or has a bad value.
        ClientGone: the client left while sending.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise HTTPException(415, "The Content-Type must be multipart/form-data.")
    try:
        form = await _parsed(request, max_bytes, check)
    except ClientDisconnect:
        raise ClientGone from None
    except MultiPartException as error:
        raise HTTPException(400, error.message, CLOSE) from None
    try:
        return await _read(form, task, max_bytes)
    finally:
        await form.close()


async def _parsed(
    request: Request, max_bytes: int, check: Callable[[str], Awaitable[Any]]
) -> FormData:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes + RECORDING_FORM_BYTES:
        raise _too_large(max_bytes)

    async def watched() -> AsyncGenerator[bytes, None]:
        size, checked = 0, False
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes + RECORDING_FORM_BYTES:
                raise _too_large(max_bytes)
            yield chunk
            for name, value in parser.items:
                if name == "model" and isinstance(value, str) and value and not checked:
                    checked = True
                    await check(value)

    limits: dict[str, int] = {"max_fields": MAX_FIELDS, "max_part_size": MAX_FIELD_BYTES}
    parser = MultiPartParser(request.headers, watched(), max_files=1, **limits)
    return await parser.parse()


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(
        413, f"The file is larger than {max_bytes} bytes (max_audio_upload_bytes).", CLOSE
    )


async def _read(form: FormData, task: Task, max_bytes: int) -> AudioForm:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequest("file must be a file.", "file", "missing_required_parameter")
    if (file.size or 0) > max_bytes:
        raise _too_large(max_bytes)
    fields = _fields(form)
    for name in LOGPROBS:
        if fields.pop(name, ""):
            raise InvalidRequest(
                f"{name} is not supported: models that are served here give no log probabilities "
                "of words.",
                name,
                "unsupported_parameter",
            )
    granularities = [
        (name, str(value)) for name, value in form.multi_items() if name in GRANULARITIES and value
    ]
    for name in GRANULARITIES:
        fields.pop(name, None)
    words = {name: fields.pop(name, "") for name in WORDS}
    if len(words["prompt"]) > MAX_HINT:
        raise InvalidRequest(
            f"prompt may have at most {MAX_HINT} characters, got {len(words['prompt'])}.",
            "prompt",
            "invalid_value",
        )
    numbers = {
        name: _number(name, fields.pop(name), kind)
        for name, kind in NUMBERS.items()
        if name in fields
    }
    listening = {
        name: _switch(name, fields.pop(name))
        if kind is bool
        else _number(name, fields.pop(name), kind)
        for name, kind in LISTENING.items()
        if name in fields
    }
    switches = {name: _switch(name, fields.pop(name, "false")) for name in SWITCHES}
    salt = check_salt(fields.pop(SALT)) if SALT in fields else None
    form_of_reply = _response_format(words["response_format"] or "json", switches["stream"])
    return AudioForm(
        task=task,
        data=await asyncio.to_thread(file.file.read),
        model=words["model"] or None,
        language=_language("language", words["language"]),
        to_language=_language("to_language", words["to_language"]),
        prompt=words["prompt"],
        response_format=form_of_reply,
        granularities=granularities,
        stream=switches["stream"],
        cache_salt=salt,
        numbers=numbers,
        listening=listening,
        ignored=sorted(fields),
    )


def _fields(form: FormData) -> dict[str, str]:
    """The fields beside the file.

    Raises:
        InvalidRequest: one is there twice, or is a file.
    """
    fields: dict[str, str] = {}
    for name, value in form.multi_items():
        if name == "file":
            continue
        shown = name[:64]
        if not isinstance(value, str):
            raise InvalidRequest(f"{shown} must not be a file.", shown, "invalid_type")
        if name in fields and not name.endswith("[]") and name not in LISTS:
            raise InvalidRequest(f"The field {shown!r} is there twice.", shown, "duplicate_key")
        fields[name] = value
    return fields


def _number(name: str, written: str, kind: type[int] | type[float]) -> int | float:
    try:
        value = kind(written)
        if not math.isfinite(value):
            raise ValueError
        return value
    except (ValueError, OverflowError):
        wanted = "a whole number" if kind is int else "a number"
        raise InvalidRequest(
            f"{name} must be {wanted}, got {written[:32]!r}.", name, "invalid_type"
        ) from None


def _switch(name: str, written: str) -> bool:
    if (value := BOOLEANS.get(written.lower())) is None:
        raise InvalidRequest(
            f"{name} must be true or false, got {written[:32]!r}.", name, "invalid_type"
        )
    return value


def _language(name: str, written: str) -> str | None:
    if written and not LANGUAGE.fullmatch(written):
        raise InvalidRequest(
            f"{name} must be a language such as 'en', got {written[:32]!r}.", name, "invalid_value"
        )
    return written or None


def _response_format(written: str, stream: bool) -> ResponseFormat:
    name, known = "response_format", get_args(ResponseFormat)
    if written not in known:
        raise InvalidRequest(
            f"{name} must be one of {', '.join(known)}, got {written[:32]!r}.",
            name,
            "unsupported_value",
        )
    if stream and written != "json":
        raise InvalidRequest(f"A stream has {name} json.", name, "unsupported_value")
    return cast(ResponseFormat, written)
