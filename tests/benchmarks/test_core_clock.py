"""The virtual clock: times are those of the formula, whatever the machine does."""

import numpy as np
import pytest
from core_clock import EIGHT_BILLION, StepTime, Visit, make_config, poisson, random_tokens, run

TIME = StepTime(step=1.0, token=0.1, kv_token=0.001, move=0.0)
RANDOM = np.random.default_rng(0)


def test_times_are_those_of_the_formula() -> None:
    outcome = run(make_config(), [Visit(5.0, random_tokens(RANDOM, 100), 3)], time=TIME)
    (visit,) = outcome.visits
    prompt, decode = 1.0 + 100 * 0.1 + 100 * 0.001, 1.0 + 0.1
    assert visit.ttft == pytest.approx(prompt)
    assert visit.gaps == pytest.approx([decode + 0.101, decode + 0.102])
    assert visit.tpot == pytest.approx(decode + 0.1015)
    assert visit.latency == outcome.seconds - 5.0
    assert (outcome.prompt_tokens, outcome.preemptions) == (100, 0)


def test_all_visits_get_all_their_tokens() -> None:
    visits = [Visit(at, random_tokens(RANDOM, 50), 9) for at in poisson(RANDOM, 100, 20)]
    outcome = run(make_config(max_decoding_batch=4), visits)
    assert [len(visit.times) for visit in outcome.visits] == [9] * 20
    assert outcome.rate == pytest.approx(180 / outcome.seconds)
    assert all(visit.ttft > 0 and min(visit.gaps) >= EIGHT_BILLION.step for visit in outcome.visits)


def test_one_visit_may_follow_another() -> None:
    def again(visit: Visit) -> list[Visit]:
        return [Visit(visit.times[-1] + 1.0, visit.prompt, 2)] if visit.at < 1.0 else []

    first = Visit(0.0, random_tokens(RANDOM, 40), 2)
    outcome = run(make_config(), [first], then=again)
    assert len(outcome.visits) == 2
    assert outcome.visits[1].at == first.times[-1] + 1.0
    assert outcome.visits[1].cached_tokens == 32, "the pages of the first one were forgotten"


def test_it_is_the_same_each_time() -> None:
    def once() -> list[float]:
        random = np.random.default_rng(1)
        visits = [Visit(at, random_tokens(random, 300), 20) for at in poisson(random, 50, 10)]
        return run(make_config(max_batch_tokens=256), visits).gaps

    assert once() == once()
