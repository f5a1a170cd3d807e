"""What a Whisper model has heard in a window of a recording, and how well.

Source of the measures and limits: Radford et al., 2022, "Robust Speech Recognition via Large-Scale
Weak Supervision", section 4.5.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rayfin.deployments.api.audio.form import Listening
from rayfin.deployments.api.audio.segments import Segment, Sentences, Span, sentences
from rayfin.deployments.api.audio.transcript import Word
from rayfin.deployments.generation.choice import Choice
from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # which imports transformers
    from rayfin.actors.media.whisper import SpeechPrompts


@dataclass(slots=True)
class Heard:
    """A transcript of one window."""

    begin: float  # of the window in the recording, seconds ...
    length: float  # ... and its own
    temperature: float
    avg_logprob: float  # of its tokens
    text: str  # of its whole sentences
    whole: Sentences
    no_speech_prob: float = 0.0
    words: list[Word] = field(default_factory=list)  # if they are asked for

    @property
    def spoken(self) -> list[int]:
        """Returns the tokens of its whole sentences, those of times among them."""
        return [token for span in self.whole.spans for token in span.tokens]

    @property
    def compression_ratio(self) -> float:
        """The bytes of its text over those of zlib: a text that repeats itself has a high one."""
        written = self.text.strip().encode()
        return len(written) / len(zlib.compress(written))

    def good(self, listening: Listening) -> bool:
        """Returns whether it need not be tried again."""
        likely = self.avg_logprob >= listening.log_prob_threshold
        return likely and self.compression_ratio <= listening.compression_ratio_threshold

    def silent(self, listening: Listening) -> bool:
        """Returns whether it was made up out of silence."""
        unlikely = self.avg_logprob < listening.log_prob_threshold
        return unlikely and self.no_speech_prob > listening.no_speech_threshold


def read_answer(
    choice: Choice,
    begin: float,
    length: float,
    temperature: float,
    speech: "SpeechPrompts",
    tokenizer: Tokenizer,
    *,
    times: bool,
) -> Heard:
    """Returns a choice as the transcript of the window at ``begin`` of ``length`` seconds.

    Args:
        times: it was asked for times; if not, it is one sentence.
    """
    # In a folder of someone's own times may be special tokens.
    tokens = [
        token
        for token in choice.token_ids
        if token not in tokenizer.special_token_ids or speech.seconds(token) is not None
    ]
    whole = Sentences([Span(0.0, length, tokens)], length, False)
    if times:
        whole = sentences(tokens, speech.seconds, length)
    average = choice.likelihood.logprob / (len(tokens) + 1)  # the end of the text is one
    heard = Heard(begin, length, temperature, average, "", whole)
    heard.text = text_of(heard.spoken, speech, tokenizer)
    return heard


def text_of(tokens: Sequence[int], speech: "SpeechPrompts", tokenizer: Tokenizer) -> str:
    """Returns the text of tokens without those for times."""
    return tokenizer.decode([token for token in tokens if speech.seconds(token) is None])


def segments(
    answers: Sequence[Heard], speech: "SpeechPrompts", tokenizer: Tokenizer
) -> list[Segment]:
    """Returns the segments of a recording in order; those without text are left out."""
    segments: list[Segment] = []
    for heard in answers:
        for span in heard.whole.spans:
            text = text_of(span.tokens, speech, tokenizer)
            if not text.strip():
                continue
            segments.append(
                Segment(
                    id=len(segments),
                    seek=round(heard.begin * 100),
                    start=round(heard.begin + span.start, 3),
                    end=round(heard.begin + span.end, 3),
                    text=text,
                    tokens=span.tokens,
                    temperature=heard.temperature,
                    avg_logprob=heard.avg_logprob,
                    compression_ratio=heard.compression_ratio,
                    no_speech_prob=heard.no_speech_prob,
                )
            )
    return segments
