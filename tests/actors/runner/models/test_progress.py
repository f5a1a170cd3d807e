"""A load's log has tensors, bytes and seconds."""

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rayfin.actors.runner.models.progress import logged_load


def test_a_load_is_logged(tiny_model: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    tiny, ticks = tiny_model("llama"), itertools.count(0.0, 6.0)
    with caplog.at_level(logging.INFO), logged_load("NAME", clock=lambda: next(ticks)):
        model = AutoModelForCausalLM.from_pretrained(tiny.folder)
    lines = [record.getMessage() for record in caplog.records if "NAME" in record.getMessage()]
    tensors = sum(1 for _ in model.parameters())
    assert len(lines) > 2 and lines[0].startswith(f"NAME: reading, 1 of {tensors} tensors, 0.00 GB")
    assert lines[-1].startswith(f"NAME: read {tensors} of {tensors} tensors, 0.00 GB, in ")


def test_bytes(tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[Any, ...]] = []
    name = "rayfin.actors.runner.models.progress.logger.info"
    monkeypatch.setattr(name, lambda *args: logged.append(args))
    with logged_load("NAME"):
        model = AutoModelForCausalLM.from_pretrained(tiny_model("llama").folder)
    expected = sum(tensor.nbytes for tensor in model.parameters())
    assert logged[-1][5] * 1e9 == pytest.approx(expected)


def test_the_hook_is_taken_off(tiny_model: Callable[..., Any]) -> None:
    with pytest.raises(OSError), logged_load("NAME"):
        AutoModelForCausalLM.from_pretrained("/no/such/folder")
    assert transformers_logging.set_tqdm_hook(None) is None
