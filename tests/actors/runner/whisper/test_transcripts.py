"""Whisper's transcripts are those of transformers' forward and logits processors, on every way."""

from collections.abc import Callable
from typing import Any

import pytest

from audio_models import tone
from whisper_models import EOS, FIRST_TIME, WhisperOracle

Make = Callable[..., Any]
OUTPUT = 24


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> WhisperOracle:
    return WhisperOracle(tmp_path_factory.mktemp("whisper"))


def _prompts(own: WhisperOracle) -> list[tuple[list[int], Any]]:
    """Prompts of all kinds, and their clips."""
    ask = own.prompts.ask
    return [
        (ask("en", "transcribe", "", times=False), tone(1, 1.9)),
        (ask("en", "transcribe", "", times=True), tone(1, 1.9)),
        (ask("German", "translate", "a hint", times=True), tone(2, 0.7)),
        (ask("zh", "transcribe", "words " * 20, times=False), tone(3)),
    ]


def _request(request_of: Make, key: int, prompt: tuple[Any, Any], output: int = OUTPUT) -> Any:
    ids, clips = prompt
    made = request_of(key, ids, output, eos=(EOS,))
    made.images = clips
    return made


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_tokens_are_transformers_own(
    attention: str, page_size: int, oracle: WhisperOracle, served: Make, request_of: Make
) -> None:
    """Four transcripts in one batch, by chunks of 40 tokens."""
    prompts = _prompts(oracle)
    settings = {"attention": attention, "page_size": page_size}
    engine = served(oracle.folder, max_batch_tokens=40, **settings)
    made = [oracle.prompt(*own, page_size) for own in prompts]
    tokens = engine.run(*(_request(request_of, key, one) for key, one in enumerate(made)))
    expected = {key: oracle.greedy(*own, OUTPUT) for key, own in enumerate(prompts)}
    assert tokens == expected
    assert len({tuple(own) for own in tokens.values()}) == len(prompts), "the clips change nothing"
    assert any(token >= FIRST_TIME for token in tokens[1])
