"""What is read of a Whisper model's folder, in the layouts that such folders have."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest

from rayfin.actors.config import EngineArgs
from rayfin.actors.media.audio_processor import AudioProcessor
from rayfin.actors.media.whisper import SpeechPrompts
from whisper_models import IDS, LANGUAGES, NAMES, POSITIONS, RATE, TEXT, TIMES, make_whisper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the files of OpenAI's first checkpoints: no tokenizer.json."""
    folder = tmp_path_factory.mktemp("whisper")
    make_whisper(folder)
    (folder / "tokenizer.json").unlink()
    added = {name: IDS[name] for name in (*NAMES[1:], *TIMES)}
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), NAMES[0])
    files = {
        "vocab.json": {name: IDS[name] for name in (*TEXT, NAMES[0])},
        "added_tokens.json": added,
        "special_tokens_map.json": {"additional_special_tokens": list(NAMES), **special},
        "tokenizer_config.json": {
            "tokenizer_class": "WhisperTokenizer",
            "processor_class": "WhisperProcessor",
            "model_max_length": 16,
            **special,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


def _prompts(folder: Path, **settings: int) -> SpeechPrompts:
    own = AudioProcessor.load(EngineArgs(model=str(folder), **settings)).transcription.speech
    assert own is not None
    return own


def test_files_of_the_first_checkpoints(folder: Path) -> None:
    own = _prompts(folder)
    tokens = own.tokens
    assert tokens.languages == {code: IDS[f"<|{code}|>"] for code in LANGUAGES}
    assert (tokens.start, tokens.place) == (IDS["<|startoftranscript|>"], IDS["<|startoflm|>"])
    assert (tokens.no_times, tokens.first_time) == (IDS["<|notimestamps|>"], IDS["<|0.00|>"])
    asked = own.ask("de", "translate", "", times=True)[1:]
    assert asked == [IDS[f"<|{name}|>"] for name in ("startoftranscript", "de", "translate")]


def test_hint_fits_a_short_context(folder: Path) -> None:
    """``max_model_len`` counts the transcript's tokens, with those of a hint."""
    for given, most in ((None, POSITIONS), (20, 20), (2, 4)):
        settings = {} if given is None else {"max_model_len": given}
        ids = _prompts(folder, **settings).ask("en", "transcribe", "word " * 99, times=True)
        assert len(ids) == 1 + 1 + (most // 2 - 1) + 3  # place, before, hint, the rest


def test_no_warning_of_long_clips(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tokenizer that knows nothing of clips takes one for too long a text."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        AudioProcessor.load(EngineArgs(model=str(folder))).process(np.zeros(RATE, np.float32))
    finally:
        logger.removeHandler(caplog.handler)
    assert "sequence length" not in caplog.text
