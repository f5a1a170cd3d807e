"""An engine on a GPU says what one on a CPU does, with recorded steps and without."""

from collections.abc import Callable
from typing import Any

import pytest

from rayfin.actors.messages import Sampling
from rayfin.actors.scheduler.policy import multi_step

Make = Callable[..., Any]
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "olmo2", "gpt2"])
def test_tokens_of_a_cpu(
    family: str,
    eager: bool,
    tiny_model: Make,
    served: Make,
    request_of: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32, greedy and seeded, recorded and not, whether the model is recognised or not."""
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)
    folder = tiny_model(family).folder
    tokens = {}
    for device in ("cpu", "cuda"):
        engine = served(folder, device=device, max_lease=8, enforce_eager=eager)
        if device == "cuda":  # what it records is of steps that Python sees
            engine.runner._model.forward = engine._forward
            engine.runner._forward.run = engine._advance
        requests = [
            request_of(
                key,
                list(range(3, 3 + length)),
                10 + 5 * key,
                sampling=Sampling(temperature=0.8 * (key % 2), top_k=20, top_p=0.9, seed=key),
            )
            for key, length in enumerate((5, 17, 2, 9))
        ]
        tokens[device] = engine.run(*requests)
    assert tokens["cuda"] == tokens["cpu"]
