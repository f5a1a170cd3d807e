"""Greedy tokens of prompts with clips of audio are transformers' own, on every way."""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from audio_models import FAMILIES, AudioModel, tone
from rayfin.actors.errors import InvalidConfig, UnsupportedModel
from rayfin.actors.messages import BeamParams
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.parts.vision import vision_model
from rayfin.actors.runner.parts.vision.load import VisionPart
from rayfin.actors.runner.parts.vision.towers import find_tower, model_class
from vision_models import EOS

Make = Callable[..., Any]

BEFORE, BETWEEN, AFTER = [80, 81, 82, 83, 84], [85, 86], [90, 91, 92]
OUTPUT = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], AudioModel]:
    """The model of a family, made once."""
    return functools.cache(lambda family: AudioModel(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, made: Make) -> AudioModel:
    model: AudioModel = made(request.param)
    return model


@pytest.fixture(params=["qwen2_audio", "voxtral"])
def tiny(request: pytest.FixtureRequest, made: Make) -> AudioModel:
    model: AudioModel = made(request.param)
    return model


def _request(request_of: Make, key: int, prompt: tuple[Any, Any], output: int = OUTPUT) -> Any:
    ids, clips = prompt
    made = request_of(key, ids, output, eos=(EOS,))
    made.parts = clips
    return made


def test_tokens_are_transformers_own(family: AudioModel, served: Make, request_of: Make) -> None:
    """Two clips of two lengths and text without any, in one batch, cut by chunks of 16."""
    prompts = [
        family.prompt(BEFORE, tone(1), AFTER),
        family.prompt(tone(2, 0.9), AFTER),
        family.prompt(BEFORE, AFTER),
        family.prompt(BEFORE, tone(1), BETWEEN, tone(3, 0.3), AFTER),
    ]
    engine = served(family.folder, max_batch_tokens=16)
    tokens = engine.run(*(_request(request_of, key, own) for key, own in enumerate(prompts)))
    assert tokens == {key: family.greedy(*own, OUTPUT) for key, own in enumerate(prompts)}
    assert len({tuple(own) for own in tokens.values()}) > 1, "the clips change nothing"


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen2_audio"])
def test_a_clip_of_several_windows(name: str, made: Make, served: Make, request_of: Make) -> None:
    own: AudioModel = made(name)
    prompt = own.prompt(BEFORE, tone(4, 2.6), AFTER)
    engine = served(own.folder, max_batch_tokens=16)
    assert engine.run(_request(request_of, 0, prompt))[0] == own.greedy(*prompt, OUTPUT)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_cut_clips(chunk: int, tiny: AudioModel, served: Make, request_of: Make) -> None:
    prompt = tiny.prompt(BEFORE, tone(1), BETWEEN, tone(1), AFTER)
    engine = served(tiny.folder, max_decoding_batch=1, max_batch_tokens=chunk)
    assert engine.run(_request(request_of, 0, prompt))[0] == tiny.greedy(*prompt, OUTPUT)
    assert engine.runner._loaded.part(VisionPart).encoder.num_encoded == 1


def test_prefix_hits_never_encode(tiny: AudioModel, served: Make, request_of: Make) -> None:
    """A second question about the same clip starts behind it; another clip is another prompt."""
    engine = served(tiny.folder, mm_encoder_cache_gb=0.0, max_batch_tokens=24)
    encoder = engine.runner._loaded.part(VisionPart).encoder
    first = tiny.prompt(BEFORE, tone(1), AFTER)
    second = tiny.prompt(BEFORE, tone(1), [100, 101])
    other = tiny.prompt(BEFORE, tone(2), [100, 101])
    engine.run(_request(request_of, 0, first))
    encoded = encoder.num_encoded
    assert engine.run(_request(request_of, 1, second))[1] == tiny.greedy(*second, OUTPUT)
    assert engine.cached[1] > first[1][0].start + 8 and encoder.num_encoded <= encoded + 1
    assert engine.run(_request(request_of, 2, other))[2] == tiny.greedy(*other, OUTPUT)
    assert engine.cached[2] <= other[1][0].start, "pages of another clip were taken"


def test_preempted_inside_a_clip(tiny: AudioModel, served: Make, request_of: Make) -> None:
    prompts = [tiny.prompt(BEFORE, tone(seed), AFTER) for seed in range(4)]
    pages = -(-(max(len(ids) for ids, _ in prompts) + 24) // 4) + 6
    settings = {"num_pages": pages, "max_model_len": 4 * (pages - 1), "max_batch_tokens": 8}
    engine = served(tiny.folder, **settings)
    tokens = engine.run(
        *(_request(request_of, key, own, 20) for key, own in enumerate(prompts)), stagger=1
    )
    assert tokens == {key: tiny.greedy(*own, 20) for key, own in enumerate(prompts)}
    assert engine.engine.stats().preemptions > 0


def test_forks_and_beams_hear_the_clip(tiny: AudioModel, served: Make, request_of: Make) -> None:
    """Choices of one prompt and a search over it, while the clip is encoded once."""
    engine = served(tiny.folder, max_batch_tokens=8)
    prompt = tiny.prompt(BEFORE, tone(1), AFTER)
    first, second, search = (_request(request_of, key, prompt) for key in range(3))
    second.parent_key = first.key
    search.beams = BeamParams(3)
    tokens = engine.run(first, second, search)
    assert tokens[0] == tokens[1] == tiny.greedy(*prompt, OUTPUT)
    assert engine.hypotheses[2][0].tokens == tiny.greedy(*prompt, OUTPUT, num_beams=3)
    assert engine.runner._loaded.part(VisionPart).encoder.num_encoded == 1


def test_replaced_runners_keep_clips(tiny: AudioModel, served: Make, request_of: Make) -> None:
    """In the middle of a clip, and in the middle of the answers."""
    engine = served(tiny.folder, max_batch_tokens=8)
    prompts = [tiny.prompt(BEFORE, tone(seed), AFTER) for seed in (1, 2)]
    engine.lose_runners(2, 9)
    tokens = engine.run(*(_request(request_of, key, own) for key, own in enumerate(prompts)))
    assert tokens == {key: tiny.greedy(*own, OUTPUT) for key, own in enumerate(prompts)}
    assert engine.lost == 2, "all was over before the second death"


def test_lost_features_fail_one_request(tiny: AudioModel, served: Make, request_of: Make) -> None:
    lost = tiny.prompt(BEFORE, tone(5), AFTER)
    engine = served(tiny.folder, max_batch_tokens=len(lost[0]))
    arrays = {name: own[..., :-7] for name, own in lost[1][0].arrays.items()}
    broken = (replace(lost[1][0], arrays=arrays),)
    good = tiny.prompt(AFTER, tone(6))
    tokens = engine.run(_request(request_of, 0, (lost[0], broken)), _request(request_of, 1, good))
    assert engine.reasons[0] == "error" and tokens[1] == tiny.greedy(*good, OUTPUT)


def test_text_only_on_request(tiny: AudioModel, served: Make, request_of: Make) -> None:
    engine = served(tiny.folder, language_model_only=True)
    assert engine.config.parts == ()
    prompt = tiny.prompt(BEFORE, AFTER)
    assert engine.run(_request(request_of, 0, prompt))[0] == tiny.greedy(*prompt, OUTPUT)


def test_a_model_that_differs_is_refused(
    tiny: AudioModel, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_model.VisionModel, "_put_images", lambda self, inputs: None)
    with pytest.raises(UnsupportedModel, match="with clips of audio: over pages its logits differ"):
        load(engine_args(tiny.folder))


def test_an_adapter_for_audio_is_refused(
    tiny: AudioModel, engine_args: Make, tmp_path: Path
) -> None:
    """Granite Speech: without it the model would hear worse, and no comparison would show it."""
    args = engine_args(shutil.copytree(tiny.folder, tmp_path / "copy"))
    path = tmp_path / "copy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"has_lora_adapter": True}))
    with pytest.raises(UnsupportedModel, match="has an adapter for audio"):
        load(args)


def test_a_checkpoint_in_16_bits_gives_the_same_bits(
    family: AudioModel, served: Make, request_of: Make, tmp_path: Path
) -> None:
    """As one that holds the same numbers in 32: all of it stays as it is stored."""
    folder, found = family.folder, []
    maker = model_class(family.model.config, "audio")
    for dtype in (torch.bfloat16, torch.float32):
        copy = Path(shutil.copytree(folder, tmp_path / str(dtype)))
        maker.from_pretrained(folder, dtype=dtype).save_pretrained(copy)
        folder = copy
        engine = served(copy, max_batch_tokens=16)
        prompt = family.prompt(BEFORE, tone(1), AFTER)
        engine.run(_request(request_of, 0, prompt))
        places = range(len(prompt[0]), len(prompt[0]) + OUTPUT)
        found.append(torch.stack([engine.sampled[0][place] for place in places]))
    assert torch.equal(*found)


def test_a_model_without_features_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no audio features"):
        find_tower(torch.nn.Linear(1, 1), "audio")


def test_prompt_embeds_are_for_models_of_text(tiny: AudioModel, engine_args: Make) -> None:
    with pytest.raises(InvalidConfig, match="enable_prompt_embeds is for models of text"):
        load(engine_args(tiny.folder, enable_prompt_embeds=True))
