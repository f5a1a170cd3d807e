"""Settings as tensors: kept while the rows stay, made anew when a request or a row changes."""

import numpy as np
import torch

from rayfin.actors.messages import Sampling
from rayfin.actors.runner.request_slots import RowSettings

CPU = torch.device("cpu")


def _rows(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def test_the_same_rows_get_the_same_tensors() -> None:
    settings = RowSettings(4)
    settings.set(1, Sampling(0.5, 3, 0.9, 0.1, 77))
    first = settings.of(_rows(1, 2), np.array([5, 6]), CPU)
    second = settings.of(_rows(1, 2), np.array([6, 7]), CPU)
    assert first.temperature is second.temperature and first.seed is second.seed
    assert first.position.tolist() == [5, 6] and second.position.tolist() == [6, 7]


def test_a_new_request_has_its_own() -> None:
    settings = RowSettings(4)
    assert settings.of(_rows(1, 2), np.array([5, 6]), CPU).all_greedy
    settings.set(2, Sampling(temperature=1.0, top_k=8, seed=9))
    rows = settings.of(_rows(1, 2), np.array([5, 6]), CPU)
    assert rows.temperature.tolist() == [0.0, 1.0] and rows.seed.tolist() == [0, 9]
    assert rows.any_top_k and not rows.all_greedy


def test_other_rows_have_theirs() -> None:
    settings = RowSettings(4)
    settings.set(1, Sampling(temperature=1.0, seed=5))
    assert settings.of(_rows(1), np.array([5]), CPU).seed.tolist() == [5]
    assert settings.of(_rows(0, 1), np.array([5, 5]), CPU).seed.tolist() == [0, 5]
    assert settings.of(_rows(1, 0), np.array([5, 5]), CPU).seed.tolist() == [5, 0]
    assert settings.of(_rows(0), np.array([5]), CPU).all_greedy
