"""Which families read images, which hear, and which are served as models of text or refused."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import UnsupportedModel
from rayfin.actors.media.kinds import media_kind, model_media
from rayfin.actors.runner.models.config import load_config

KINDS = {
    "llava": "image",
    "qwen2_audio": "audio",
    "qwen3_asr": "audio",
    "voxtral": "audio",
    "glmasr": "audio",
    "audioflamingo3": "audio",
    "gemma3n": None,  # transformers has it as a model of text too
    "llama": None,
    "whisper": "audio",
    "moonshine": None,
    "t5": None,
}


@pytest.mark.parametrize("family", KINDS)
def test_kinds(family: str) -> None:
    assert media_kind(AutoConfig.for_model(family)) == KINDS[family]


def test_an_encoder_decoder_that_hears_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("moonshine").save_pretrained(tmp_path)
    args = EngineArgs(model=str(tmp_path))
    assert model_media(args) is None
    with pytest.raises(UnsupportedModel, match="it is an encoder-decoder"):
        load_config(args)
