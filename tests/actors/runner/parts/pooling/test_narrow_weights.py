"""Models that pool are packed as they are stored: the same bits, the dtype of their checkpoint."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pooling_models import TEXTS, add_modules, make_decoder, make_encoder
from rayfin import LLM
from rayfin.actors.runner.models import mapped_weights, weights
from rayfin.actors.runner.models.mapped_weights import NarrowWeight, narrow_loads
from rayfin.deployments.offline.pooling import PooledRequest

SETTINGS: dict[str, Any] = {"threads": 1, "max_decoding_batch": 4, "max_batch_tokens": 64}
MAKES: dict[str, Any] = {"encoder": make_encoder, "decoder": make_decoder}


def in_16_bits(folder: Path) -> Path:
    path = folder / "model.safetensors"
    save_file(
        {name: one.bfloat16() for name, one in load_file(path).items()}, path, {"format": "pt"}
    )
    return folder


def numbers(found: list[PooledRequest]) -> np.ndarray:
    values: list[Any] = [one.outputs for one in found]
    return np.float32([getattr(own, "embedding", None) or own.probs for own in values])


def answers(folder: Path, task: str) -> np.ndarray:
    with LLM(str(folder), **SETTINGS) as llm:
        run = llm.embed if task == "embed" else llm.classify
        return numbers(run(TEXTS, use_tqdm=False))


@pytest.mark.parametrize(
    ("make", "kind", "task"),
    [
        *(("encoder", kind, "embed") for kind in ("bert", "modernbert", "distilbert")),
        ("encoder", "nomic_bert", "embed"),
        *(("encoder", kind, "classify") for kind in ("bert", "roberta", "modernbert")),
        *(("decoder", "qwen3", task) for task in ("embed", "classify")),
    ],
)
def test_the_same_bits_as_of_a_model_in_float32(
    make: str, kind: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if task == "embed":
        folder = add_modules(MAKES[make](tmp_path, kind), {"pooling_mode": "cls"})
    else:
        folder = MAKES[make](tmp_path, kind, "classes", num_labels=3)
    in_16_bits(folder)
    held: list[set[str]] = []
    real = mapped_weights.hold_narrow

    def spy(model: torch.nn.Module, names: set[str]) -> None:
        held.append(set(names))
        real(model, names)

    monkeypatch.setattr(weights, "hold_narrow", spy)
    found = answers(folder, task)
    assert held and held[0], "no weight was narrow"
    monkeypatch.setattr(weights, "narrow_loads", lambda wanted: narrow_loads(False))
    expected = answers(folder, task)
    assert not held[-1]
    assert (found == expected).all()


def test_nothing_is_narrow_when_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch reads the embeddings and the classifier's head as plain float32."""
    from rayfin.actors.runner.parts import registry
    from rayfin.actors.runner.parts.pooling.load import load_encoder

    folder = in_16_bits(make_encoder(tmp_path, "bert", "classes", num_labels=3))
    loaded: list[Any] = []

    def load(*given: Any) -> Any:
        loaded.append(load_encoder(*given))
        return loaded[-1]

    monkeypatch.setattr(registry, "WHOLE", (load,))
    answers(folder, "classify")
    (part,) = loaded[0].parts
    model, head = loaded[0].model.transformer, part._head._model
    for module in (model, head):
        own = [parameter for _, parameter in module.named_parameters()]
        assert own and not any(isinstance(parameter, NarrowWeight) for parameter in own)
        assert all(parameter.dtype == torch.float32 for parameter in own)
