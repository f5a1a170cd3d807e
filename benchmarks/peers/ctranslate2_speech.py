"""CTranslate2, faster-whisper's engine, in float32 (`pip install ctranslate2 "transformers<5"`).

The model is converted on first use, beside its folder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
from ctranslate2.converters import TransformersConverter
from speech import PROMPT, RATE, peer, timed
from transformers import WhisperFeatureExtractor


def written(folder: str, clips: int, tokens: int) -> float:
    """Seconds of ``Whisper.generate`` over one batch."""
    converted = Path(f"{folder}-ct2")
    if not converted.exists():
        TransformersConverter(folder).convert(str(converted))
    model = ctranslate2.models.Whisper(str(converted), device="cpu", compute_type="float32")
    extractor = WhisperFeatureExtractor.from_pretrained(folder)

    def write(samples: Sequence[Any]) -> int:
        features = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features
        results = model.generate(
            ctranslate2.StorageView.from_array(features),
            [PROMPT] * len(samples),
            beam_size=1,
            max_length=2 * tokens,  # it writes half as many
            suppress_tokens=[256],  # the end of a text
            suppress_blank=False,
        )
        return sum(len(result.sequences_ids[0]) for result in results)

    return timed(write, clips, tokens)


if __name__ == "__main__":
    peer(written)
