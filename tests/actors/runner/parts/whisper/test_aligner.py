"""Heads that follow the speech, of models whose settings name others too."""

from types import SimpleNamespace
from typing import Any

import pytest

from rayfin.actors.runner.parts.whisper.aligner import alignment_heads

UPPER = {1: [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ([[1, 0], [1, 3], [0, 2]], {1: [0, 3], 0: [2]}),
        (None, UPPER),
        ([[7, 0], [25, 6]], UPPER),  # those of a teacher, as kotoba-whisper has them
        ([[1, 2], [1, 4], [2, 0]], {1: [2]}),
    ],
)
def test_only_heads_that_the_model_has(named: Any, expected: dict[int, list[int]]) -> None:
    model = SimpleNamespace(
        config=SimpleNamespace(decoder_layers=2, decoder_attention_heads=4),
        generation_config=SimpleNamespace(alignment_heads=named),
    )
    assert alignment_heads(model) == expected
