"""What ``LLM`` says of pictures that it cannot take: its code, and the path of the argument."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidConfig, InvalidRequest
from rayfin.actors.media.image_processor import ImageProcessor
from vision_models import make_vision_model, picture

PARAMS = SamplingParams(temperature=0, max_tokens=2)
PATH = "prompt[0].multi_modal_data"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[LLM]:
    model = tmp_path_factory.mktemp("llava")
    make_vision_model("llava", model)
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_memory": 10**6}
    with LLM(str(model), **settings, allowed_local_media_path=str(folder)) as llm:
        yield llm


BAD: dict[str, tuple[Any, int, str, str]] = {  # data, places in the prompt, param, code
    "no object": ("x", 1, PATH, "unsupported_content"),
    "video": ({"video": [picture(1)]}, 1, PATH, "unsupported_content"),
    "image and audio": ({"image": picture(1), "audio": 1}, 1, PATH, "unsupported_content"),
    "name of a file": ({"image": "a.png"}, 1, f"{PATH}.image", "invalid_type"),
    "bytes": ({"image": [b"\x89PNG"]}, 1, f"{PATH}.image", "invalid_type"),
    "fewer pictures": ({"image": [picture(1)]}, 2, PATH, "invalid_image_count"),
    "more pictures": ({"image": [picture(1), picture(2)]}, 1, PATH, "invalid_image_count"),
    "no place": ({"image": picture(1)}, 0, PATH, "invalid_image_count"),
    "too many": ({"image": [picture(1)] * 9}, 9, f"{PATH}.image", "too_many_images"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures(llm: LLM, name: str) -> None:
    data, places, param, code = BAD[name]
    prompt = {"prompt": "what " + "<image>" * places, "multi_modal_data": data}
    with pytest.raises(InvalidRequest) as refused:
        llm.generate([prompt], PARAMS, use_tqdm=False)
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize(
    ("url", "code"),
    [
        *(("file:///etc/passwd", "media_url_refused"), ("http://127.0.0.1/", "media_url_refused")),
        *(("data:image/png;base64,AAAA", "invalid_image"), ("", "invalid_type")),
    ],
)
def test_bad_addresses(llm: LLM, url: str, code: str) -> None:
    content = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(InvalidRequest) as refused:
        llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
    assert refused.value.code == code
    assert refused.value.param == "messages[0].content[0].image_url.url"


def test_it_answers_afterwards(llm: LLM) -> None:
    """A refused request leaves nothing behind; pictures of other modes are as their RGB."""
    prompt = {"prompt": "what <image>", "multi_modal_data": {"image": picture(1)}}
    other = {**prompt, "multi_modal_data": {"image": [picture(1).convert("RGBA")]}}
    first, second = llm.generate([prompt, other], PARAMS, use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert first.prompt_token_ids == second.prompt_token_ids


def saved(mode: str, turn: int) -> bytes:
    """A picture of which some is clear, in a file that says how it is turned."""
    picture = Image.fromarray(np.random.default_rng(turn).integers(0, 255, (6, 9, 3), np.uint8))
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = turn
    clear = {
        "RGB": tuple(picture.getpixel((1, 1))),
        "P": 3,
        "L": picture.convert("L").getpixel((1, 1)),
    }  # type: ignore[arg-type]
    options = {"transparency": clear[mode]} if mode in clear else {}
    picture.convert(mode).save(file, "PNG", exif=exif, **options)
    return file.getvalue()


@pytest.mark.parametrize("mode", ["RGB", "P", "L", "RGBA", "I;16"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_all_ways_in_see_the_same_pixels(
    llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, turn: int
) -> None:
    data = saved(mode, turn)
    (folder / f"{mode}-{turn}.png").write_bytes(data)
    seen: list[Any] = []
    inner = ImageProcessor.process
    monkeypatch.setattr(
        ImageProcessor,
        "process",
        lambda self, image: (seen.append(np.array(image)), inner(self, image))[1],
    )
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": {"url": f"file://{folder}/{mode}-{turn}.png"}},
        {"type": "image_pil", "image_pil": Image.open(io.BytesIO(data))},
    ]
    for part in parts:
        llm.chat([{"role": "user", "content": [part]}], PARAMS, use_tqdm=False)
    array = seen[0]
    for given in (Image.open(io.BytesIO(data)), [Image.open(io.BytesIO(data))], array, array[None]):
        prompt = {"prompt": "what <image>", "multi_modal_data": {"image": given}}
        llm.generate(prompt, PARAMS, use_tqdm=False)
    assert array.shape == ((6, 9, 3) if turn < 5 else (9, 6, 3))
    assert len(seen) >= len(parts) + 3  # a file that was seen is not processed again
    assert all(np.array_equal(one, array) for one in seen)


def test_a_folder_that_is_missing() -> None:
    with pytest.raises(InvalidConfig, match="there is no folder"):
        LLM("demo", allowed_local_media_path="/no/such/folder")
