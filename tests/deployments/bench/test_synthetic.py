"""Synthetic traces have the statistics that were published, whatever their seed."""

import pytest

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.bench import synthetic
from rayfin.deployments.bench.synthetic import BURST, MOONCAKE, burst, mooncake
from rayfin.deployments.bench.traces import Call

# (requests a second, mean prompt, mean answer, cached share) of the paper's table; the rates are
# those of the released files.
TABLE = {
    "conversation": (12_031 / 3537, 12_035, 343, 0.40),
    "toolagent": (23_608 / 3600, 8_596, 182, 0.59),
    "synthetic": (3_993 / 1022, 15_325, 149, 0.66),
}
SEEDS = (0, 1, 2)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TABLE)
def test_mooncakes_table(name: str, seed: int) -> None:
    rate, prompt, output, cached = TABLE[name]
    trace = mooncake(name, 6000, seed=seed)
    assert len(trace.calls) == 6000
    assert 5999 / trace.calls[-1].arrival == pytest.approx(rate, rel=0.1)
    assert trace.mean_prompt == pytest.approx(prompt, rel=0.1)
    assert trace.mean_output == pytest.approx(output, rel=0.1)
    assert trace.hit_ratio == pytest.approx(cached, abs=0.05)


def test_the_order_of_the_three_is_that_of_the_paper() -> None:
    ratios = [mooncake(name, 2000).hit_ratio for name in ("conversation", "toolagent", "synthetic")]
    assert ratios == sorted(ratios)


@pytest.mark.parametrize("name", TABLE)
def test_blocks_are_those_of_512_tokens(name: str) -> None:
    for call in mooncake(name, 300, seed=3).calls:
        assert len(call.blocks) == -(-call.prompt_tokens // 512)
        assert len(set(call.blocks)) == len(call.blocks)


def test_a_prefix_is_kept_from_its_first_block_on() -> None:
    """A block's place in a prompt, and the block before it, are always the same."""
    before: dict[int, int | None] = {}
    for call in mooncake("toolagent", 500).calls:
        for left, own in zip((None, *call.blocks), call.blocks, strict=False):
            assert before.setdefault(own, left) == left


def test_conversations_share_their_first_block_and_go_on() -> None:
    calls = mooncake("conversation", 2000).calls
    assert len({call.blocks[0] for call in calls}) == 1
    seen: set[int] = set()
    going_on = 0
    for call in calls:
        going_on += sum(own in seen for own in call.blocks) > 1
        seen.update(call.blocks)
    assert going_on / len(calls) == pytest.approx(0.387, abs=0.06)  # of the released trace


def test_bursts_are_as_published() -> None:
    """Counts of a minute vary more than those of a Poisson process in the conversations only."""
    assert _dispersion(mooncake("conversation", 8000).calls) == pytest.approx(1 / 0.35, rel=0.5)
    assert _dispersion(mooncake("synthetic", 8000).calls) == pytest.approx(1, rel=0.5)


def test_traces_repeat() -> None:
    assert mooncake("synthetic", 50) == mooncake("synthetic", 50)
    assert mooncake("synthetic", 50) != mooncake("synthetic", 50, seed=1)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", BURST, ids=" ".join)
def test_bursts_of_burstgpt(kind: tuple[str, str], seed: int) -> None:
    known = BURST[kind]  # type: ignore[index]
    trace = burst(5000, *kind, seed=seed)  # type: ignore[arg-type]
    gaps = [
        after.arrival - before.arrival
        for before, after in zip(trace.calls, trace.calls[1:], strict=False)
    ]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(known.shape * known.scale, rel=0.1)
    assert deviation / mean == pytest.approx(known.shape**-0.5, rel=0.15)
    assert trace.hit_ratio == 0
    assert all(1 <= call.prompt_tokens <= 2048 for call in trace.calls)


@pytest.mark.parametrize("model", ["ChatGPT", "GPT-4"])
def test_lengths_of_conversations(model: str) -> None:
    calls = burst(8000, model).calls  # type: ignore[arg-type]
    prompts = sorted(call.prompt_tokens for call in calls)
    assert prompts[4000] == pytest.approx(353, rel=0.15)
    assert prompts[7600] == pytest.approx(1638, rel=0.15)
    # the figure's mean answers: short for prompts of about 300 tokens, long for long ones
    middle, long = _answers(calls, 250, 350), _answers(calls, 1900, 2048)
    assert 140 <= middle <= 190 and 380 <= long <= 470


def test_lengths_of_calls_of_the_api() -> None:
    trace = burst(8000, "ChatGPT", "api")
    assert trace.mean_prompt == pytest.approx(621, rel=0.05)
    assert trace.mean_output == pytest.approx(126, rel=0.05)


def test_an_unknown_kind() -> None:
    with pytest.raises(InvalidConfig, match="llama"):
        burst(5, "llama")  # type: ignore[arg-type]


def test_the_share_that_goes_on_solves_the_table() -> None:
    """A session's mean prompt, with its turns, is the published one."""
    for published in MOONCAKE.values():
        for kind in published.kinds:
            assert 0 <= kind.follow < 0.95 and 0 < kind.first <= kind.prompt
    assert sum(own.share for own in synthetic.MOONCAKE["synthetic"].kinds) == 1


def _dispersion(calls: list[Call]) -> float:
    """Variance / mean of the calls of each minute."""
    minutes = int(calls[-1].arrival // 60)
    counts = [0] * minutes
    for call in calls:
        if call.arrival < 60 * minutes:
            counts[int(call.arrival // 60)] += 1
    mean = sum(counts) / minutes
    return sum((own - mean) ** 2 for own in counts) / minutes / mean


def _answers(calls: list[Call], low: int, high: int) -> float:
    answers = [call.output_tokens for call in calls if low <= call.prompt_tokens <= high]
    return sum(answers) / len(answers)
