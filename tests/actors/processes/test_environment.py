import os

import pytest

from rayfin.actors.processes.environment import ENVIRONMENT, set_ray_environment


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_an_operators_word_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "environ", {name: "10"})
    set_ray_environment()
    assert os.environ == {**ENVIRONMENT, name: "10"}


def test_ray_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    set_ray_environment()
    assert os.environ == ENVIRONMENT
