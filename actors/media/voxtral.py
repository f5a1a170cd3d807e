"""Voxtral's processor for audio. That of transformers leaves a clip's tokens to mistral-common.

The forms of prompts are those of mistral-common (``InstructTokenizerV7``).
"""

from typing import Any

import numpy as np
from transformers.processing_utils import ProcessorMixin

from rayfin.actors.media.audio_processor import Transcription

AUDIO, BEGIN_AUDIO = "[AUDIO]", "[BEGIN_AUDIO]"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
    "[SYSTEM_PROMPT]{{ text(message.content) }}[/SYSTEM_PROMPT]"
    "{% elif message.role == 'user' %}[INST]{{ text(message.content) }}[/INST]"
    "{% elif message.role == 'assistant' %}{{ text(message.content) }}{{ eos_token }}"
    "{% else %}{{ raise_exception('Messages of ' + message.role + ' are not supported.') }}"
    "{% endif %}{% endfor %}"
)
PARTS = (
    "{%- macro text(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}"
    "{%- for part in content -%}{%- if part.type == 'audio' -%}" + BEGIN_AUDIO + AUDIO + "{%- else "
    "-%}{{- part.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)


def _write(language: str | None, _: str) -> str:
    behind = f"lang:{language}" if language else ""
    return f"<s>[INST]{BEGIN_AUDIO}{AUDIO}[/INST]{behind}[TRANSCRIBE]"


class VoxtralProcessor(ProcessorMixin):
    """Windows of a clip, each a fixed number of tokens. The last one is padded.

    Args:
        window_tokens: tokens of a window.
    """

    audio_kwargs = {"truncation": False, "padding": True, "return_tensors": "np"}
    window_tokens = 0
    transcription = Transcription(write=_write, takes_hint=False)

    def __init__(self, feature_extractor: Any = None, tokenizer: Any = None, **_: Any) -> None:
        parts = (feature_extractor, tokenizer)
        super().__init__(*parts, chat_template=PARTS + TEMPLATE)  # type: ignore[no-untyped-call]
        self.audio_token = AUDIO

    def _process_audio(self, audio: Any, **settings: Any) -> Any:
        extractor = self.feature_extractor
        whole = [
            extractor(clip, pad_to_multiple_of=extractor.n_samples, **settings)["input_features"]
            for clip in audio
        ]
        windows = [  # [1, mels, N * frames] -> [N, mels, frames]
            np.stack(np.split(features[0], features.shape[-1] // extractor.nb_max_frames, axis=-1))
            for features in map(np.asarray, whole)
        ]
        texts = [self.audio_token * (self.window_tokens * len(stack)) for stack in windows]
        return {"input_features": np.concatenate(windows)}, texts


def voxtral_class(config: Any) -> type[VoxtralProcessor]:
    """The class whose windows have as many tokens as those of an encoder of this ``config``."""
    tokens = config.max_source_positions * config.hidden_size // config.intermediate_size
    return type("Voxtral", (VoxtralProcessor,), {"window_tokens": tokens})
