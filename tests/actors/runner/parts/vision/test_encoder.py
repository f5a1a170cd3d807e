"""The encoder runs the tower once for an image, while it has room for its embeddings."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from rayfin.actors import failpoints
from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InjectedFault, RequestFailed
from rayfin.actors.failpoints import Failpoints
from rayfin.actors.media.part import MediaInput
from rayfin.actors.messages import StepResult
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.models.mapped_weights import NarrowWeight
from rayfin.actors.runner.parts.vision.encoder import MediaEncoder
from rayfin.actors.runner.parts.vision.load import VisionPart
from vision_models import VisionModel, picture


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> VisionModel:
    return VisionModel("llava", tmp_path_factory.mktemp("llava"))


def image_of(tiny: VisionModel, seed: int) -> tuple[MediaInput, int]:
    made = tiny.processor.process(picture(seed))
    return MediaInput(made.digest, 0, len(made.ids), made.arrays), len(made.ids)


def used(encoder: MediaEncoder) -> Any:
    """What the next result says of images."""
    info: Any = None
    result = StepResult(0, 0, np.zeros((1, 1), np.int32))
    encoder.after(info, result)
    return result.usage[0] if result.usage else None


def test_the_least_recently_used_goes_first(tiny: VisionModel) -> None:
    first, second, third = (image_of(tiny, seed) for seed in (1, 2, 3))
    base = tiny.model.model
    one = MediaEncoder(base, 2**30).embeddings(*first)
    encoder = MediaEncoder(base, 2 * one.nbytes)
    for image in (first, second, first, third, first):
        assert torch.equal(encoder.embeddings(*image), MediaEncoder(base, 0).embeddings(*image))
    assert encoder.num_encoded == 3 and encoder.num_bytes == 2 * one.nbytes
    usage = used(encoder)
    assert (usage.hits, usage.evictions, len(usage.seconds)) == (2, 1, 3)
    assert used(encoder) is None
    encoder.embeddings(*second)
    assert encoder.num_encoded == 4


def test_another_number_of_embeddings_fails_the_request(tiny: VisionModel) -> None:
    image, count = image_of(tiny, 1)
    with pytest.raises(RequestFailed, match=f"{count} embeddings for {count + 1} tokens"):
        MediaEncoder(tiny.model.model, 0).embeddings(image, count + 1)


def test_a_fault_strikes_once_an_image_is_encoded(
    tiny: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "ACTIVE", Failpoints("runner.image=raise"))
    encoder = MediaEncoder(tiny.model.model, 2**30)
    with pytest.raises(InjectedFault):
        encoder.embeddings(*image_of(tiny, 1))
    encoder.embeddings(*image_of(tiny, 1))  # it has them now
    assert encoder.num_encoded == 1


def test_the_tower_runs_on_its_own_number_of_threads(
    tiny: VisionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, (image, count), seen = tiny.model.model, image_of(tiny, 1), []
    own = base.get_image_features

    def watched(pixel_values: torch.Tensor, **fields: Any) -> Any:
        seen.append(torch.get_num_threads())
        return own(pixel_values=pixel_values, **fields)

    monkeypatch.setattr(base, "get_image_features", watched)
    encoder, before = MediaEncoder(base, 0), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        encoder.threads = 2
        encoder.embeddings(image, count)
        assert seen == [2] and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_a_tower_has_the_threads_of_the_kernels(tiny: VisionModel) -> None:
    loaded = load(EngineArgs.from_dict({"model": str(tiny.folder), "threads": 2}))
    if loaded.kernels is None:
        pytest.skip("no compiled kernels")
    vision = loaded.part(VisionPart)
    assert vision is not None and vision.encoder.threads == 2


def test_a_tower_keeps_the_16_bits_of_its_checkpoint(tiny: VisionModel, tmp_path: Path) -> None:
    """In memory of its own: a file that is written over changes no embedding."""
    make: Any = AutoModelForImageTextToText
    shutil.copytree(tiny.folder, tmp_path, dirs_exist_ok=True)
    make.from_pretrained(tiny.folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = load(EngineArgs(model=str(tmp_path), device="cpu", threads=1))
    vision = loaded.part(VisionPart)
    assert vision is not None
    encoder, (image, count) = vision.encoder, image_of(tiny, 1)
    tower: Any = encoder._model
    parts = [*tower.vision_tower.modules(), *tower.multi_modal_projector.modules()]
    weights: list[Any] = [part.weight for part in parts if type(part) is nn.Linear]
    assert weights and all(isinstance(weight, NarrowWeight) for weight in weights)
    assert {weight.numbers().dtype for weight in weights} == {torch.bfloat16}
    before = encoder.embeddings(image, count)
    wide = make.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(MediaEncoder(wide.model, 0).embeddings(image, count), before)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    encoder.clear()
    assert torch.equal(encoder.embeddings(image, count), before)
