"""Which engine takes a request: the one with the least work ahead of it."""

import numpy as np

from rayfin.actors.messages import EngineRequest, Sampling, StopRules
from rayfin.deployments.client.routing import RUNNING_TOKENS, Candidate, LeastLoaded

REQUEST = EngineRequest("r", np.array([1, 2], np.int32), Sampling(), StopRules(3))


def pick(*candidates: Candidate) -> str:
    return LeastLoaded().pick(REQUEST, candidates).name


def test_least_work_ahead() -> None:
    idle = Candidate("idle")
    assert pick(Candidate("busy", running=1), idle) == "idle"
    assert pick(Candidate("queue", waiting=1, waiting_tokens=9), Candidate("b", running=1)) == "b"
    assert pick(Candidate("sent", sent=1, sent_tokens=5), idle) == "idle"


def test_long_prompts_weigh_more_than_a_running_request() -> None:
    prompt = Candidate("prompt", waiting=1, waiting_tokens=10 * RUNNING_TOKENS)
    assert pick(prompt, Candidate("running", running=10)) == "running"
    assert pick(prompt, Candidate("running", running=12)) == "prompt"


def test_even_ones_take_turns() -> None:
    router = LeastLoaded()
    engines = [Candidate(name) for name in "cab"]
    assert [router.pick(REQUEST, engines).name for _ in range(5)] == ["a", "b", "c", "a", "b"]
    assert router.pick(REQUEST, engines[:1]).name == "c"
