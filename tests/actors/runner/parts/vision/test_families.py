"""Greedy tokens of prompts with images are transformers' own, for each family and on every way."""

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from rayfin.actors.errors import InvalidConfig, InvalidRequest, UnsupportedModel
from rayfin.actors.media.part import MediaFacts
from rayfin.actors.messages import BeamParams, EngineInfo
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.loading import load
from rayfin.actors.runner.models import paged_model
from rayfin.actors.runner.parts.vision.load import VisionPart
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.build_requests import build_requests
from rayfin.kernels.cpu.library import try_load
from vision_models import EOS, FAMILIES, VisionModel, picture

Make = Callable[..., Any]

BEFORE, BETWEEN, AFTER = [60, 61, 62, 63, 64], [65, 66], [70, 71, 72]
OUTPUT = 6
LEAST = {"gemma3": 20, "paligemma": 50}
"""Tokens of a step that holds an image whole, or a prompt, beside four rows that decode."""


PATHS = ["llava", "qwen2_vl", "qwen3_vl", "smolvlm", "mistral3", "gemma3", "paligemma"]
"""Families that differ in how images enter the language model."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], VisionModel]:
    """The model of a family, made once."""
    return functools.cache(lambda family: VisionModel(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, made: Make) -> VisionModel:
    model: VisionModel = made(request.param)
    return model


@pytest.fixture(params=PATHS)
def tiny(request: pytest.FixtureRequest, made: Make) -> VisionModel:
    model: VisionModel = made(request.param)
    return model


@pytest.fixture
def llava(made: Make) -> VisionModel:
    model: VisionModel = made("llava")
    return model


def _settings(tiny: VisionModel, chunk: int) -> dict[str, int]:
    """Steps of ``chunk`` tokens, or of the fewest that the family takes."""
    least = LEAST.get(tiny.family)
    if least is None:
        return {"max_batch_tokens": chunk}
    return {"max_batch_tokens": max(chunk, least), "max_decoding_batch": 4}


def _request(request_of: Make, key: int, prompt: tuple[Any, Any], output: int = OUTPUT) -> Any:
    ids, images = prompt
    made = request_of(key, ids, output, eos=(EOS,))
    made.parts = images
    return made


def test_tokens_are_transformers_own(family: VisionModel, served: Make, request_of: Make) -> None:
    """Two images of two sizes and text without any, in one batch, cut by chunks of 16."""
    prompts = [
        family.prompt(BEFORE, picture(1), AFTER),
        family.prompt(picture(2, 30, 60), AFTER),
        family.prompt(BEFORE, AFTER),
        family.prompt(BEFORE, picture(1), BETWEEN, picture(3), AFTER),
    ]
    engine = served(family.folder, **_settings(family, 16))
    tokens = engine.run(*(_request(request_of, key, own) for key, own in enumerate(prompts)))
    assert tokens == {key: family.greedy(*own, OUTPUT) for key, own in enumerate(prompts)}
    assert len({tuple(own) for own in tokens.values()}) > 1, "the images change nothing"


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
def test_chunks_cut_images(chunk: int, tiny: VisionModel, served: Make, request_of: Make) -> None:
    prompt = tiny.prompt(BEFORE, picture(1), BETWEEN, picture(1), AFTER)
    settings = {"max_decoding_batch": 1} | _settings(tiny, chunk)
    engine = served(tiny.folder, **settings)
    assert engine.run(_request(request_of, 0, prompt))[0] == tiny.greedy(*prompt, OUTPUT)
    assert engine.runner._loaded.part(VisionPart).encoder.num_encoded == 1


def test_prefix_hits_never_encode(tiny: VisionModel, served: Make, request_of: Make) -> None:
    """A second question about the same image starts behind it; another image is another prompt."""
    engine = served(tiny.folder, mm_encoder_cache_gb=0.0, **_settings(tiny, 24))
    encoder = engine.runner._loaded.part(VisionPart).encoder
    first = tiny.prompt(BEFORE, picture(1), AFTER)
    second = tiny.prompt(BEFORE, picture(1), [80, 81])
    other = tiny.prompt(BEFORE, picture(2), [80, 81])
    engine.run(_request(request_of, 0, first))
    encoded = encoder.num_encoded
    assert engine.run(_request(request_of, 1, second))[1] == tiny.greedy(*second, OUTPUT)
    if tiny.family == "paligemma":
        assert engine.cached[1] == 0, "a page of a prompt that is read both ways was shared"
    else:
        assert engine.cached[1] > first[1][0].start + 8 and encoder.num_encoded <= encoded + 1
    assert engine.run(_request(request_of, 2, other))[2] == tiny.greedy(*other, OUTPUT)
    assert engine.cached[2] <= other[1][0].start, "pages of another image were taken"


def test_preempted_inside_an_image(tiny: VisionModel, served: Make, request_of: Make) -> None:
    prompts = [tiny.prompt(BEFORE, picture(seed), AFTER) for seed in range(4)]
    pages = -(-(max(len(ids) for ids, _ in prompts) + 24) // 4) + 6
    engine = served(
        tiny.folder, num_pages=pages, max_model_len=4 * (pages - 1), **_settings(tiny, 8)
    )
    tokens = engine.run(
        *(_request(request_of, key, own, 20) for key, own in enumerate(prompts)), stagger=1
    )
    assert tokens == {key: tiny.greedy(*own, 20) for key, own in enumerate(prompts)}
    assert engine.engine.stats().preemptions > 0


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_forks_and_beams_see_the_image(
    name: str, made: Make, served: Make, request_of: Make
) -> None:
    """Choices of one prompt and a search over it, while the image is encoded once."""
    tiny = made(name)
    engine = served(tiny.folder, **_settings(tiny, 8))
    prompt = tiny.prompt(BEFORE, picture(1), AFTER)
    first, second, search = (_request(request_of, key, prompt) for key in range(3))
    second.parent_key = first.key
    search.beams = BeamParams(3)
    tokens = engine.run(first, second, search)
    assert tokens[0] == tokens[1] == tiny.greedy(*prompt, OUTPUT)
    best = tiny.greedy(*prompt, OUTPUT, num_beams=3)
    assert engine.hypotheses[2][0].tokens == best
    assert engine.runner._loaded.part(VisionPart).encoder.num_encoded == 1


def test_a_step_beside_streams_begins_one_image(
    llava: VisionModel, served: Make, request_of: Make
) -> None:
    engine = served(llava.folder, max_batch_tokens=64)
    text = llava.prompt(BEFORE, AFTER)
    prompts = {
        key: llava.prompt(BEFORE, picture(key), BETWEEN, picture(key + 10), AFTER)
        for key in range(1, 4)
    }
    stream = request_of(0, text[0], 40)
    tokens = engine.run(
        stream, *(_request(request_of, key, own) for key, own in prompts.items()), stagger=2
    )
    assert {key: tokens[key] for key in prompts} == {
        key: llava.greedy(*own, OUTPUT) for key, own in prompts.items()
    }
    begun = []
    for step in engine.steps:
        if step.decoding_batch:
            rows = range(step.decoding_batch, len(step.ids))
            begun.append(sum(_images_begun(step.chunk_prompt(row), llava) for row in rows))
    assert max(begun) == 1 and sum(begun) >= 5


def test_replaced_runners_keep_images(tiny: VisionModel, served: Make, request_of: Make) -> None:
    """In the middle of an image, and in the middle of the answers."""
    engine = served(tiny.folder, **_settings(tiny, 8))
    prompts = [tiny.prompt(BEFORE, picture(seed), AFTER) for seed in (1, 2)]
    deaths = (2, 5) if tiny.family in LEAST else (2, 9)
    engine.lose_runners(*deaths)
    tokens = engine.run(*(_request(request_of, key, own) for key, own in enumerate(prompts)))
    assert tokens == {key: tiny.greedy(*own, OUTPUT) for key, own in enumerate(prompts)}
    assert engine.lost == 2, "all was over before the second death"


def _images_begun(chunk: Any, tiny: VisionModel) -> int:
    """Images whose first token is in a chunk of the prompts above."""
    firsts = {
        int(tiny.prompt(picture(seed))[0][0]) for key in range(1, 4) for seed in (key, key + 10)
    }
    return sum(token in firsts for token in chunk.tolist())


def test_an_image_is_encoded_once(llava: VisionModel, served: Make, request_of: Make) -> None:
    """Also without pages to share; the cache is bounded in bytes, the oldest leave it."""
    engine = served(llava.folder, prefix_caching=False)
    encoder = engine.runner._loaded.part(VisionPart).encoder
    for key in range(3):
        engine.run(_request(request_of, key, llava.prompt(BEFORE, picture(1), AFTER)))
    assert encoder.num_encoded == 1
    encoder._max_bytes = encoder.num_bytes
    for key, seed in enumerate((1, 2, 2, 1), start=3):
        engine.run(_request(request_of, key, llava.prompt(BEFORE, picture(seed), AFTER)))
    assert encoder.num_encoded == 3 and encoder.num_bytes <= encoder._max_bytes
    stats = engine.engine.stats()
    assert (stats.images_encoded, stats.image_cache_hits) == (3, 4)
    assert stats.image_cache_evictions == 2 and stats.image_cache_bytes == encoder.num_bytes
    assert stats.histograms["image_encode_seconds"].count == 3


def test_lost_pixels_fail_one_request(llava: VisionModel, served: Make, request_of: Make) -> None:
    engine = served(llava.folder)
    lost = llava.prompt(BEFORE, picture(5), AFTER)
    broken = (replace(lost[1][0], arrays={"pixel_values": lost[1][0].arrays["pixel_values"][0]}),)
    good = llava.prompt(AFTER, picture(6))
    tokens = engine.run(_request(request_of, 0, (lost[0], broken)), _request(request_of, 1, good))
    assert engine.reasons[0] == "error" and tokens[1] == llava.greedy(*good, OUTPUT)


def test_images_that_no_step_holds(made: Make, served: Make, engine_args: Make) -> None:
    """A step too small for the model's images is refused at the start, a larger image later."""
    tiny = made("gemma3")
    with pytest.raises(InvalidConfig, match="max_batch_tokens .19. must be at least 20"):
        served(tiny.folder, max_batch_tokens=19, max_decoding_batch=4)
    config = served(tiny.folder, **_settings(tiny, 20)).config
    info = EngineInfo(
        "a", config.max_model_len, 512, 99, 4, parts=(MediaFacts(token_id=3),), uncut=config.uncut
    )
    ids, (image,) = tiny.prompt(BEFORE, picture(1), AFTER)
    plain = [max(token, 3) for token in ids]
    settings: dict[str, Any] = {"request_id": "a", "eos_token_ids": [EOS]}
    assert build_requests(plain, SamplingParams(), info, images=[image], **settings)
    larger = replace(image, length=image.length + 1)
    with pytest.raises(InvalidRequest, match="room for 16 tokens") as raised:
        build_requests(plain, SamplingParams(), info, images=[larger], **settings)
    assert raised.value.code == "too_large_for_a_step"


def test_gemma_without_a_processor_reads_text(
    made: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    tiny = made("gemma3")
    shutil.copytree(tiny.folder, tmp_path / "text")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "text" / name).unlink()
    engine = served(tmp_path / "text")
    assert engine.config.parts == ()
    prompt = tiny.prompt(BEFORE, AFTER)
    assert engine.run(_request(request_of, 0, prompt))[0] == tiny.greedy(*prompt, OUTPUT)


def test_text_only_on_request(llava: VisionModel, served: Make, request_of: Make) -> None:
    engine = served(llava.folder, language_model_only=True)
    assert engine.config.parts == ()
    prompt = llava.prompt(BEFORE, AFTER)
    assert engine.run(_request(request_of, 0, prompt))[0] == llava.greedy(*prompt, OUTPUT)


def test_a_model_that_differs_is_refused(
    llava: VisionModel, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayfin.actors.runner.parts.vision import vision_model

    monkeypatch.setattr(vision_model.VisionModel, "_put_images", lambda self, inputs: None)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        load(engine_args(llava.folder))


def test_features_of_layers_are_added(
    made: Make, engine_args: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepStack: a model without what its first layers get of an image would be another one."""
    tiny = made("qwen3_vl")
    assert tiny.model.model.visual.deepstack_visual_indexes
    monkeypatch.setattr(paged_model, "added_states", lambda given, tokens: {})
    with pytest.raises(UnsupportedModel, match="logits differ"):
        load(engine_args(tiny.folder, attention="torch"))


@pytest.mark.skipif(try_load() is None, reason="the CPU kernels are not built")
def test_compiled_decoders_add_them_too(made: Make, served: Make, request_of: Make) -> None:
    tiny = made("qwen3_vl")
    engine = served(tiny.folder, max_batch_tokens=7, max_decoding_batch=2)
    assert isinstance(engine.runner._model.text, CpuDecoder)
    prompt = tiny.prompt(BEFORE, picture(4, 60, 50), AFTER)
    assert engine.run(_request(request_of, 0, prompt))[0] == tiny.greedy(*prompt, OUTPUT)


def test_missing_processor(llava: VisionModel, engine_args: Make, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(llava.folder, folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()
    with pytest.raises(InvalidConfig, match="processor cannot be loaded"):
        load(engine_args(folder))


@pytest.mark.parametrize("name", [*PATHS, "qwen2_5_vl", "internvl", "pixtral"])
def test_a_checkpoint_in_16_bits_gives_the_same_bits(
    name: str, made: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    """As one that holds the same numbers in 32: all of it stays as it is stored."""
    tiny, found = made(name), []
    folder = tiny.folder
    for dtype in (torch.bfloat16, torch.float32):
        copy = Path(shutil.copytree(folder, tmp_path / str(dtype)))
        AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).save_pretrained(copy)
        folder = copy
        engine = served(copy, **_settings(tiny, 16))
        prompt = tiny.prompt(BEFORE, picture(1), AFTER)
        engine.run(_request(request_of, 0, prompt))
        places = range(len(prompt[0]), len(prompt[0]) + OUTPUT)
        found.append(torch.stack([engine.sampled[0][place] for place in places]))
    assert torch.equal(*found)
