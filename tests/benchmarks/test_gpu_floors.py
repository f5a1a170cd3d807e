"""What an H200 cannot go under with the 0.6B shape, against figures worked out by hand."""

import pytest
from gpu_floors import Floors
from shapes import SHAPES


@pytest.mark.parametrize(
    ("rows", "context", "tokens_per_second"),
    [(1, 128, 3563), (1, 1024, 3284), (32, 128, 82_800), (256, 128, 222_400), (256, 1024, 35_200)],
)
def test_decode(rows: int, context: int, tokens_per_second: int) -> None:
    floors = Floors.of(SHAPES["0.6b"][1], 4.3e12, 790e12)
    assert floors.kv_bytes == 114_688
    assert rows / floors.decode([context] * rows) == pytest.approx(tokens_per_second, rel=1e-3)


def test_a_run_is_its_prompts_and_its_steps() -> None:
    floors = Floors(layer_weights=10, head_weights=5, kv_bytes=4, bandwidth=2.0, flops=1e9)
    prompts = floors.prefill(3 + 7)
    steps = [(30 + 4 * (4 + 8)) / 2, (30 + 4 * 9) / 2, (30 + 4 * 10) / 2]  # one ends after two
    assert floors.run([(3, 2), (7, 4)]) == pytest.approx(prompts + sum(steps))
