"""The tokens with rules come from files of many hands."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from rayfin.actors.runner.parts.whisper.rules import RuleTokens
from whisper_models import EOS, IDS, WhisperOracle


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> WhisperOracle:
    folder: Path = tmp_path_factory.mktemp("whisper")
    return WhisperOracle(folder)


@pytest.mark.parametrize(
    ("settings", "never", "never_first"),
    [
        ({"suppress_tokens": None, "begin_suppress_tokens": None}, [], []),
        ({"suppress_tokens": [3, -1, 50256], "begin_suppress_tokens": [EOS, 50256]}, [3], [EOS]),
        ({}, [], []),
    ],
)
def test_tokens_of_a_config(
    settings: dict[str, Any], never: list[int], never_first: list[int], oracle: WhisperOracle
) -> None:
    """Some may be null, absent, or no token of the model; so may be the end."""
    for end in (None, EOS, [EOS]):
        config = GenerationConfig(**settings, eos_token_id=end)  # type: ignore[no-untyped-call]
        own = RuleTokens.of(oracle.prompts.tokens, config, len(IDS))
        assert (own.never, own.never_first, own.end) == (never, never_first, EOS)
