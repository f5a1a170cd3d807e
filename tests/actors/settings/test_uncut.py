"""Parts of prompts that one step computes whole."""

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.settings.uncut import TEXT_TOKENS, Uncut


def test_spans() -> None:
    images = [(3, 19), (25, 41)]
    assert Uncut().spans(images, 50) == []
    assert Uncut("image").spans(images, 50) == images
    assert Uncut("prompt").spans(images, 50) == [(0, 50)]


def test_tokens_of_a_step() -> None:
    assert Uncut().batch_tokens(None, 256, 64) == 256
    assert Uncut().batch_tokens(8, 256, 64) == 8
    assert Uncut("image", 256).batch_tokens(None, 256, 64) == 320
    assert Uncut("image", 16).batch_tokens(None, 256, 64) == 256
    assert Uncut("prompt", 256).batch_tokens(None, 256, 64) == 320 + TEXT_TOKENS
    assert Uncut("image", 256).batch_tokens(320, 256, 64) == 320
    with pytest.raises(InvalidConfig, match="must be at least 320") as raised:
        Uncut("image", 256).batch_tokens(319, 256, 64)
    assert raised.value.param == "max_batch_tokens"
