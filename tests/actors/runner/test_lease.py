"""A lease in the real runner gives what as many calls of one step give."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rayfin.actors.config import resolve
from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.scheduler.policy import multi_step

pytestmark = pytest.mark.slow(reason="many engines")

Make = Callable[..., Any]
PROMPTS = [list(range(3 + i, 3 + i + n)) for i, n in enumerate((7, 12, 1, 16, 9))]
FAMILIES = ["llama", "gemma3_text"]  # full attention, and sliding windows


@pytest.fixture(autouse=True)
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as ``max_lease`` says, however slow the machine."""
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)


def _longest(engine: Any) -> int:
    return max(step.num_steps for step in engine.steps)


def _sampling(kind: str, key: int) -> Sampling:
    if kind == "greedy":
        return Sampling()
    return Sampling(temperature=1.2, top_k=(0, 20)[key % 2], top_p=0.95, seed=1000 + key)


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_lease_changes_nothing(
    family: str, kind: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    """Tokens equal, logits within 1e-5; rows end at their own lengths, pages grow on the way."""
    folder = tiny_model(family).folder
    runs = {}
    for most in (1, 7, 16):
        engine = served(folder, max_lease=most)
        requests = [
            request_of(key, prompt, 18 + 3 * key, sampling=_sampling(kind, key))
            for key, prompt in enumerate(PROMPTS)
        ]
        runs[most] = engine.run(*requests, stagger=2), engine.sampled
        assert _longest(engine) == most
    tokens, logits = runs[1]
    assert [len(own) for own in tokens.values()] == [18, 21, 24, 27, 30]
    for most in (7, 16):
        assert runs[most][0] == tokens
        for key, expected in logits.items():
            assert runs[most][1][key].keys() == expected.keys()
            for position, row in expected.items():
                torch.testing.assert_close(runs[most][1][key][position], row, atol=1e-5, rtol=0)


@pytest.mark.parametrize("at", [1, 4, 8, 13])
@pytest.mark.parametrize("family", FAMILIES)
def test_stop_in_the_middle(
    family: str, at: int, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny = tiny_model(family)
    free = tiny.greedy(PROMPTS[1], 24)
    stop = free[at]
    engine = served(tiny.folder, max_lease=16)
    requests = [
        request_of(key, prompt, 24, eos=[stop, 126, 127] if key == 1 else ())
        for key, prompt in enumerate(PROMPTS)
    ]
    tokens = engine.run(*requests)
    assert tokens[1] == free[: free.index(stop) + 1]
    assert engine.reasons[1] == "stop"
    for key in (0, 2, 3, 4):
        assert tokens[key] == _greedy(tiny, PROMPTS[key], 24)
    assert _longest(engine) == 16


def _greedy(tiny: Any, prompt: list[int], count: int) -> list[int]:
    """Past the model's own end of sequence, as a request without one."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(tiny.logits(prompt + tokens)[-1].argmax()))
    return tokens


def test_more_stop_tokens_than_one_comparison_takes(
    tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny = tiny_model("llama")
    free = _greedy(tiny, PROMPTS[0], 20)
    unseen = [token for token in range(128) if token not in free][:20]
    engine = served(tiny.folder, max_lease=16)
    tokens = engine.run(request_of(0, PROMPTS[0], 20, eos=[*unseen, free[9]]))
    assert tokens[0] == free[: free.index(free[9]) + 1]


def test_bad_logits_in_the_middle_fail_their_row_alone(
    tiny_model: Make, served: Make, request_of: Make, poison: Make
) -> None:
    """The row's own token becomes poison; what it said before is good.

    Row 0 has ended by then, so that the failed one is not where it was in the lease's first step.
    """
    tiny, lengths = tiny_model("llama"), (3, 20, 20, 20, 20)
    expected = [
        _greedy(tiny, prompt, length) for prompt, length in zip(PROMPTS, lengths, strict=True)
    ]
    index, bad = next(
        (i, token)
        for i, token in enumerate(expected[1])
        if 5 <= i and token not in expected[1][:i] and token not in PROMPTS[1]
    )
    engine = served(tiny.folder, max_lease=16)
    poison(engine, bad)
    tokens = engine.run(*(request_of(key, PROMPTS[key], lengths[key]) for key in range(5)))
    assert _longest(engine) == 16
    assert tokens[1] == expected[1][: index + 1]
    for key, prompt in enumerate(PROMPTS):
        if bad in [*prompt, *expected[key]]:
            assert engine.reasons[key] == ("error" if bad != expected[key][-1] else "length")
        else:
            assert tokens[key] == expected[key] and engine.reasons[key] == "length"
    assert engine.reasons[1] == "error" and "not finite" in engine.errors[1]
    again = engine.run(request_of(9, PROMPTS[1], index + 1))[9]
    assert engine.cached[9] == 0 and again == expected[1][: index + 1]


def test_min_tokens_hold_within_a_lease(tiny_model: Make, served: Make, request_of: Make) -> None:
    tiny, prompt = tiny_model("llama"), PROMPTS[1]
    free = _greedy(tiny, prompt, 20)
    sampling = Sampling(banned=(free[6],), banned_until=len(prompt) + 12)

    def tokens(most: int) -> list[int]:
        engine = served(tiny.folder, max_lease=most)
        own = engine.run(request_of(0, prompt, 20, eos=[free[6]], sampling=sampling))[0]
        return list(own)

    assert free[6] not in tokens(16)[:12]
    assert tokens(16) == tokens(1)


@pytest.mark.parametrize("scheduler", ["v0", "v1"])
def test_preemption_between_leases(
    scheduler: str, tiny_model: Make, served: Make, request_of: Make
) -> None:
    tiny = tiny_model("gemma3_text")
    engine = served(tiny.folder, num_pages=12, max_model_len=44, scheduler=scheduler, max_lease=16)
    tokens = engine.run(*(request_of(key, prompt, 26) for key, prompt in enumerate(PROMPTS)))
    assert engine.engine.stats().preemptions > 0 and _longest(engine) > 1
    for key, prompt in enumerate(PROMPTS):
        assert tokens[key] == _greedy(tiny, prompt, 26)


def test_handmade_lease(tiny_model: Make, engine_args: Make, step_of: Make, row: Make) -> None:
    """[R, L]; a row says nothing more after its stop token or its cap."""
    tiny = tiny_model("llama")
    args = engine_args(tiny.folder)
    runner = ModelRunner(args)
    runner.start(resolve(args, *runner.profile()), epoch=0)
    free = [_greedy(tiny, [5, 6, number], 8) for number in (7, 8, 9)]
    stop = free[1][3]
    new = [
        NewRequest(0, Sampling(), cap=3 + 8),
        NewRequest(1, Sampling(), cap=3 + 8, stop_token_ids=frozenset([stop])),
        NewRequest(2, Sampling(), cap=3 + 5),
    ]
    prompts = [
        row(handle, [5, 6, 7 + handle], held=3, new_pages=[3 * handle + page for page in range(3)])
        for handle in range(3)
    ]
    first = runner.execute(step_of(*prompts, new=new))
    assert first.tokens.tolist() == [[own[0]] for own in free]
    decoding = [row(handle, [-1], kv_len=3, held=3, decoding=True) for handle in range(3)]
    second = runner.execute(replace(step_of(*decoding, step=1), num_steps=7))
    assert second.tokens.shape == (3, 7) and second.errors == {}
    said = [[token for token in own if token >= 0] for own in second.tokens.tolist()]
    assert said[0] == free[0][1:8]
    assert said[1] == free[1][1 : free[1].index(stop, 1) + 1]
    assert said[2] == free[2][1:5]
    for own, tokens in zip(said, second.tokens.tolist(), strict=True):
        assert tokens == own + [-1] * (7 - len(own))
