"""What a step tells of its tokens' log probabilities is what the model says of them."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.messages import NO_TOKEN, Sampling

Make = Callable[..., Any]


def _prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 128) for _ in range(draw.randint(2, 20))]


@pytest.mark.parametrize("max_lease", [1, 8])
def test_rows_that_ask(max_lease: int, tiny_model: Make, served: Make, request_of: Make) -> None:
    """Of a step's rows some ask, for 0 to 200 of 128 tokens; some samples are banned."""
    tiny = tiny_model("llama")
    engine = served(tiny.folder, max_lease=max_lease)
    asked = {0: 3, 1: None, 2: 0, 3: 200, 4: 5}
    requests = [
        request_of(
            key,
            _prompt(key),
            9,
            sampling=Sampling(
                temperature=0.9 * (key % 2),
                seed=key,
                logprobs=most,
                banned=tuple(range(64)) if key == 4 else (),
                banned_until=200 if key == 4 else 0,
            ),
        )
        for key, most in asked.items()
    ]
    results: list[tuple[Any, Any]] = []
    execute = engine.runner.execute
    keys: list[list[int]] = []

    def recorded(info: Any) -> Any:
        own = engine._keys[info.epoch, info.step]
        keys.append([own[handle] for handle in info.ids.tolist()])
        results.append((info, execute(info)))
        return results[-1][1]

    engine.runner.execute = recorded
    tokens = engine.run(*requests)
    logprobs = {k: tiny.logits(_prompt(k) + tokens[k]).log_softmax(-1) for k in asked}
    told: dict[int, int] = dict.fromkeys(asked, 0)
    for (info, result), rows in zip(results, keys, strict=True):
        lease = info.lease
        asks = {i for i, key in enumerate(rows) if asked[key] is not None}
        sampled = {i * lease + j for i, j in np.argwhere(result.tokens != NO_TOKEN).tolist()}
        expected = sorted(at for at in sampled if at // lease in asks)
        if not expected:
            assert result.logprobs is None
            continue
        said = result.logprobs
        assert said.at.tolist() == expected and said.at.dtype == np.int32
        for index, at in enumerate(expected):
            key, column = rows[at // lease], at % lease
            row = info.kv_len[at // lease] + info.chunk_len[at // lease] + column - 1
            truth, token = logprobs[key][row], result.tokens[at // lease, column]
            most = min(asked[key], 128)
            torch.testing.assert_close(
                torch.tensor(said.values[index, :most]), truth.topk(most).values, atol=1e-4, rtol=0
            )
            np.testing.assert_allclose(said.chosen[index], truth[token].item(), atol=1e-4)
            assert said.rank[index] == int((truth > truth[token]).sum()) + 1
            assert said.ids[index, :most].tolist() == truth.topk(most).indices.tolist()
            told[key] += 1
    assert told == {0: 9, 1: 0, 2: 9, 3: 9, 4: 9}
