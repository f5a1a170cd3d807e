"""A clip of audio as its model's encoder reads it, and the tokens that stand for it in a prompt.

Both come from transformers' processor of the model. A clip is processed alone, so what its encoder
gets never depends on the clips beside it.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.assemble import assembled
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.processed import ProcessedMedia, ReplacingText, as_arrays, processed

if TYPE_CHECKING:  # it imports transformers
    from rayfin.actors.media.whisper import SpeechPrompts

Samples: TypeAlias = npt.NDArray[np.float32]
"""A clip [N] in [-1, 1], of one channel at the processor's rate."""

FOR_PROMPTS = {"num_audio_tokens", "audio_embed_sizes"}
"""What audio processors give for the sake of the prompt alone."""

CODE = "invalid_audio"
TRANSCRIBE = "Transcribe the speech in this audio. Answer with the transcript alone."


WINDOW = 30.0  # seconds, of a processor that has none of its own

ASR_TEXT = "<asr_text>"
"""What Qwen3-ASR writes between the language that it hears and the text."""


@dataclass(frozen=True, slots=True)
class Transcription:
    """How a model is asked to write down a clip: by an instruction in a chat, or in its own form.

    ``write`` makes such a form: the text of a prompt with the clip's place, of the language of the
    speech or None, and of a client's hint. It raises ValueError for a language that it does not
    know.
    """

    instruction: str = TRANSCRIBE
    audio_first: bool = True  # the clip comes before the instruction
    write: Callable[[str | None, str], str] | None = None
    takes_hint: bool = True
    mark: str = ""  # in answers: what is before it is the language
    speech: "SpeechPrompts | None" = None  # of Whisper: then no other field counts


class AudioProcessor:
    """The audio side of a model's processor (``MediaProcessor``)."""

    kind: MediaKind = "audio"
    types_of_images = False

    def __init__(self, processor: Any, settings: Mapping[str, Any]) -> None:
        self._processor = processor
        extractor, tokenizer = processor._audio_processor, processor.tokenizer
        self.rate = int(extractor.sampling_rate)
        """Samples a second of the clips that ``process`` takes."""
        merged = processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs, **settings)
        self._options = {
            "return_tensors": "pt",
            **merged["audio_kwargs"],
            "sampling_rate": self.rate,
        }
        self.token = str(processor.audio_token)
        self.place_id = self.media_token_id = int(tokenizer.convert_tokens_to_ids(self.token))
        self.max_seconds = _longest(processor, self._options, self.rate)
        """Of a clip that the processor does not cut; None: it cuts none."""
        self.window_seconds = _window(extractor, self.max_seconds)
        """Of the clips that a long recording is cut into."""
        self._for_prompts = FOR_PROMPTS | set(processor.unused_input_names)
        self._texts = ReplacingText(tokenizer)
        self.transcription = _transcription(processor)

    @classmethod
    def load(cls, args: EngineArgs) -> "AudioProcessor":
        """The processor of the model's folder; see ``assembled`` for what it raises."""
        from transformers import AutoConfig, AutoFeatureExtractor
        from transformers.models.auto import processing_auto

        auto: Any = AutoFeatureExtractor
        names: Any = processing_auto  # its types do not name the mapping
        hub: Any = {"trust_remote_code": args.trust_remote_code, **args.hub}
        config = AutoConfig.from_pretrained(args.model, **hub)
        extractor = auto.from_pretrained(args.model, **hub)
        parts = {"feature_extractor": extractor, "audio_processor": extractor}
        usual = names.PROCESSOR_MAPPING_NAMES.get(config.model_type)
        inner = assembled(args, parts, lambda name: _own_class(name, config, args), usual)
        processor = cls(inner, args.mm_processor_kwargs or {})
        if config.model_type == "whisper":
            from rayfin.actors.media.whisper import speech_prompts

            speech = speech_prompts(inner.tokenizer, config, args)
            processor.transcription = Transcription(speech=speech)
        return processor

    @property
    def chat_template(self) -> str | None:
        """The template of a folder whose tokenizer has none."""
        template = getattr(self._processor, "chat_template", None)
        return template if isinstance(template, str) else None

    def process(self, samples: Samples) -> ProcessedMedia:
        """Makes the features of a clip; takes milliseconds to a second of a core.

        Raises:
            InvalidRequest: it is too long or too short for the model.
        """
        seconds = len(samples) / self.rate
        if self.max_seconds is not None and seconds > self.max_seconds:
            raise InvalidRequest(
                f"This model hears clips of at most {self.max_seconds:g} seconds; this one has "
                f"{seconds:.1f}.",
                "audio",
                CODE,
            )
        inner = self._processor
        try:
            *_, clips = inner.prepare_inputs_layout(audio=[samples], text=[self.token])
            features, (text,) = inner._process_audio(clips, **self._options)
        except (ValueError, TypeError, ZeroDivisionError, IndexError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(
                f"This model's processor refuses the audio: {reason}", "audio", CODE
            ) from error
        ids = self._texts.ids(text)
        if self.media_token_id not in ids:
            raise InvalidRequest(
                f"This audio is too short for the model: it has {seconds:.3f} seconds.",
                "audio",
                CODE,
            )
        return replace(processed(as_arrays(features, self._for_prompts), ids), seconds=seconds)


def _longest(processor: Any, options: Mapping[str, Any], rate: int) -> float | None:
    """Seconds behind which a processor cuts a clip off, saying nothing."""
    longest = getattr(processor, "max_audio_len", None)
    if longest is not None:
        window = processor._audio_processor.chunk_length
        return float(longest // window * window)
    extractor = processor._audio_processor
    samples = getattr(extractor, "n_samples", None)
    usual = inspect.signature(extractor.__call__).parameters.get("truncation")
    cuts = options.get("truncation", usual is not None and usual.default)
    if samples is None or not cuts:
        return None
    return float(samples / rate)


def _window(extractor: Any, longest: float | None) -> float:
    """Seconds that an encoder hears at once."""
    length: Any = getattr(extractor, "chunk_length", None)
    window = float(length) if isinstance(length, int | float) and length > 0 else WINDOW
    return window if longest is None else min(window, longest)


def _own_class(kind: str | None, config: Any, args: EngineArgs) -> Any:
    """The class of a processor for audio where transformers' own makes no tokens of a clip."""
    if config.model_type == "whisper":
        from rayfin.actors.media.whisper import whisper_class

        return whisper_class(config, args.page_size)
    if kind != "VoxtralProcessor":
        return None
    from rayfin.actors.media.voxtral import voxtral_class

    return voxtral_class(config.audio_config)


def _transcription(processor: Any) -> Transcription:
    transcription = getattr(processor, "transcription", None)
    if isinstance(transcription, Transcription):
        return transcription
    request = getattr(processor, "apply_transcription_request", None)
    if request is None or not processor.chat_template:
        return Transcription()
    clip = [np.zeros(1, np.float32)]  # what the processor writes around one depends on none

    def write(language: str | None, hint: str) -> str:
        texts = request(clip, language=language, prompt=hint or None, tokenize=False)
        return str(texts[0])

    if "language" in inspect.signature(request).parameters:
        mark = ASR_TEXT if ASR_TEXT in write("en", "") else ""
        return Transcription(write=write, mark=mark)
    instruction = getattr(processor, "default_transcription_prompt", None)
    if not isinstance(instruction, str):
        return Transcription()
    (text,) = request(clip, tokenize=False)
    if instruction not in text:  # a folder with another template
        return Transcription()
    first = text.index(processor.audio_token) < text.index(instruction)
    return Transcription(instruction, audio_first=first)
