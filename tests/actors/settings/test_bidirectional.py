"""Parts of prompts that one step computes whole."""

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.settings.bidirectional import TEXT_TOKENS, Bidirectional


def test_spans() -> None:
    images = [(3, 19), (25, 41)]
    assert Bidirectional().spans(images, 50) == []
    assert Bidirectional("image").spans(images, 50) == images
    assert Bidirectional("prompt").spans(images, 50) == [(0, 50)]


def test_tokens_of_a_step() -> None:
    assert Bidirectional().batch_tokens(None, 256, 64) == 256
    assert Bidirectional().batch_tokens(8, 256, 64) == 8
    assert Bidirectional("image", 256).batch_tokens(None, 256, 64) == 320
    assert Bidirectional("image", 16).batch_tokens(None, 256, 64) == 256
    assert Bidirectional("prompt", 256).batch_tokens(None, 256, 64) == 320 + TEXT_TOKENS
    assert Bidirectional("image", 256).batch_tokens(320, 256, 64) == 320
    with pytest.raises(InvalidConfig, match="must be at least 320") as raised:
        Bidirectional("image", 256).batch_tokens(319, 256, 64)
    assert raised.value.param == "max_batch_tokens"
