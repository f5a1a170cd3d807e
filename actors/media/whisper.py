"""Whisper's side of a prompt: a clip as the tokens whose pages its decoder attends to, and the
control tokens in front of a transcript.

Source of the prompts: Radford et al., 2022, "Robust Speech Recognition via Large-Scale Weak
Supervision", and ``WhisperForConditionalGeneration.generate`` of transformers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from transformers import GenerationConfig, PretrainedConfig
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE
from transformers.processing_utils import ProcessorMixin

from rayfin.actors.config import EngineArgs

Task: TypeAlias = Literal["transcribe", "translate"]

START, BEFORE = "<|startoftranscript|>", "<|startofprev|>"
NO_TIMES = "<|notimestamps|>"
PLACE = "<|startoflm|>"  # no prompt has it, and no answer may
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
MULTILINGUAL_VOCABULARY = 51865
SECONDS_PER_TIME = 0.02  # between two neighbouring tokens for times


@dataclass(frozen=True, slots=True)
class SpeechTokens:
    """The control tokens of a Whisper model. Ids of times follow one another to the end."""

    start: int
    tasks: dict[str, int]  # empty: the model writes down English only, as are ``languages``
    languages: dict[str, int]  # by their codes: "en", "de"
    no_times: int
    first_time: int  # 0.00 seconds
    before: int | None  # in front of the text of what came before
    place: int  # stands for the clip

    @property
    def no_speech(self) -> int:
        """In place of a language or a text: there is no speech."""
        return self.no_times - 1  # folders have several names for it

    @classmethod
    def of(cls, tokenizer: Any, vocabulary: int, generation: GenerationConfig) -> "SpeechTokens":
        """Those of transformers' ``tokenizer``.

        Raises:
            KeyError: it is not one of a Whisper model.
        """
        known: dict[str, int] = tokenizer.get_vocab()
        multilingual = getattr(generation, "is_multilingual", None)
        if multilingual is None:
            multilingual = vocabulary >= MULTILINGUAL_VOCABULARY
        tasks: dict[str, int] = {}
        languages: dict[str, int] = {}
        if multilingual:
            tasks = {name: known[f"<|{name}|>"] for name in ("transcribe", "translate")}
            matches = ((LANGUAGE.fullmatch(text), token) for text, token in known.items())
            languages = {match[1]: token for match, token in matches if match is not None}
        no_times = known[NO_TIMES]
        before, place = known.get(BEFORE), known[PLACE]
        return cls(known[START], tasks, languages, no_times, no_times + 1, before, place)


class SpeechPrompts:
    """The prompts of a Whisper model: the place of a clip, then its control tokens.

    Args:
        tokenizer: transformers'.
        most_tokens: of a prompt and its transcript.
    """

    def __init__(self, tokenizer: Any, tokens: SpeechTokens, most_tokens: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self._most_hint = max(most_tokens // 2 - 1, 1)  # as transformers and OpenAI cut it

    @property
    def hears_languages(self) -> bool:
        """Whether a prompt names the language of the speech, which ``detect`` can find out."""
        return bool(self.tokens.languages)

    def detect(self) -> list[int]:
        """The prompt whose one answer token is the language of the clip; see ``language``."""
        return [self.tokens.place, self.tokens.start]

    @staticmethod
    def plain_code(language: str) -> str:
        """The code of a language that is written as one ("en", "en-US"), or by its English name."""
        lower = language.lower()
        return TO_LANGUAGE_CODE.get(lower, lower.partition("-")[0])

    def language(self, token: int) -> str | None:
        """The code of the language that a token stands for."""
        codes = {token: code for code, token in self.tokens.languages.items()}
        return codes.get(token)

    def ask(
        self,
        language: str | None,
        task: Task,
        hint: str,
        *,
        times: bool,
        before: Sequence[int] = (),
    ) -> list[int]:
        """The prompt for a transcript.

        Args:
            language: a code or an English name, of a model of many languages.
            hint: text that came before the clip, or words that it may hold. Of a long one its end
                counts.
            before: tokens of the transcript that came before, behind the hint.
            times: whether the transcript has the times of its segments.

        Raises:
            ValueError: the model does not know the language, or does not translate.
        """
        tokens = self.tokens
        ids = [tokens.place]
        text = [*before]
        if hint.strip():
            hint = " " + hint.strip()
            text = [*self._tokenizer.encode(hint, add_special_tokens=False), *before]
        if text and tokens.before is not None:
            ids += [tokens.before, *text[-self._most_hint :]]
        ids.append(tokens.start)
        if tokens.languages:
            ids += [tokens.languages[self._code(language)], tokens.tasks[task]]
        elif task == "translate":
            raise ValueError("this model does not translate")
        elif language is not None and self.plain_code(language) != "en":
            raise ValueError("this model writes down English only")
        return ids if times else [*ids, tokens.no_times]

    def _code(self, language: str | None) -> str:
        if language is None:
            raise ValueError("a prompt names the language")
        code = self.plain_code(language)
        if code not in self.tokens.languages:
            raise ValueError(f"this model does not know the language {language!r}")
        return code

    def seconds(self, token: int) -> float | None:
        """The time in the clip that a token stands for; None: it is no time."""
        first = self.tokens.first_time
        return round((token - first) * SECONDS_PER_TIME, 2) if token >= first else None


class WhisperProcessor(ProcessorMixin):
    """A clip of up to 30 seconds, padded to all of them, and as many tokens as its states.

    Args:
        clip_tokens: whole pages that hold the states.
    """

    audio_kwargs = {"return_tensors": "np"}
    clip_tokens = 0

    def __init__(self, feature_extractor: Any = None, tokenizer: Any = None, **_: Any) -> None:
        super().__init__(feature_extractor, tokenizer)  # type: ignore[no-untyped-call]
        self.audio_token = PLACE

    def _process_audio(self, audio: Any, **settings: Any) -> Any:
        features = [self.feature_extractor(clip, **settings)["input_features"] for clip in audio]
        texts = [PLACE * self.clip_tokens for _ in audio]
        return {"input_features": np.concatenate(features)}, texts


def whisper_class(config: PretrainedConfig, page_size: int) -> type[WhisperProcessor]:
    """The class whose clips fill whole pages of ``page_size`` tokens."""
    tokens = clip_tokens(config, page_size)
    return type("Whisper", (WhisperProcessor,), {"clip_tokens": tokens})


def clip_tokens(config: PretrainedConfig, page_size: int) -> int:
    """Tokens in front of a prompt that stand for a clip: its states, up to the end of a page."""
    pages = -(-int(config.max_source_positions) // page_size)
    return pages * page_size


def speech_prompts(tokenizer: Any, config: PretrainedConfig, args: EngineArgs) -> SpeechPrompts:
    """The prompts of the model in ``args``.

    Raises:
        KeyError: its tokenizer lacks a control token.
    """
    tokens = SpeechTokens.of(tokenizer, config.vocab_size, generation_config(args))
    max_positions = config.max_target_positions
    return SpeechPrompts(tokenizer, tokens, min(args.max_model_len or max_positions, max_positions))


def generation_config(args: EngineArgs) -> GenerationConfig:
    """Of the model's folder; empty where it has none."""
    try:
        return GenerationConfig.from_pretrained(args.model, **args.hub)
    except OSError:
        return GenerationConfig()  # type: ignore[no-untyped-call]
