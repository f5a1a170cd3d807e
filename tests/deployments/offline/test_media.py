"""What ``LLM`` says of pictures that it cannot take: its code, and the path of the argument."""

from collections.abc import Iterator
from typing import Any

import pytest

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidRequest
from vision_models import make_vision_model, picture

PARAMS = SamplingParams(temperature=0, max_tokens=2)
PATH = "prompt[0].multi_modal_data"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("llava")
    make_vision_model("llava", folder)
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_memory": 10**6}
    with LLM(str(folder), **settings) as llm:
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
