"""``LLM`` hears: arrays of samples, files in a conversation, and what it says of others."""

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from audio_models import AUDIO, AudioModel, tone, wav
from rayfin import LLM, BeamSearchParams, SamplingParams
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.part import VIRTUAL_TOKENS

OUTPUT = 6
PARAMS = SamplingParams(temperature=0, max_tokens=OUTPUT)
PATH = "prompt[0].multi_modal_data"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> AudioModel:
    return AudioModel("qwen2_audio", tmp_path_factory.mktemp("qwen2_audio"))


@pytest.fixture(scope="module")
def llm(tiny: AudioModel) -> Iterator[LLM]:
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_memory": 10**6}
    with LLM(str(tiny.folder), limit_mm_per_prompt={"audio": 3}, **settings) as llm:
        yield llm


def expected(llm: LLM, tiny: AudioModel, *parts: Any) -> tuple[list[int], list[int]]:
    """Tokens of the prompt as users see them, and of transformers' answer."""
    tokenizer = llm.get_tokenizer()
    written = [
        tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else part
        for part in parts
    ]
    ids, clips = tiny.prompt(*written)
    shown = [AUDIO if token < VIRTUAL_TOKENS else token for token in ids]
    return shown, tiny.greedy(ids, clips, OUTPUT)


def test_generate(llm: LLM, tiny: AudioModel) -> None:
    """One clip and several, with their rate and without."""
    place = tiny.processor.token
    fast = np.repeat(tone(3), 2)
    asked: list[Any] = [
        {"prompt": f"hear {place} so", "multi_modal_data": {"audio": (tone(1), 16000)}},
        {"prompt": f"hear {place} so", "multi_modal_data": {"audio": tone(1).tolist()}},
        {
            "prompt": f"{place}{place} differ",
            "multi_modal_data": {"audio": [(tone(1), 16000), tone(2)]},
        },
        "text alone",
        {"prompt": place, "multi_modal_data": {"audio": (fast, 32000)}},
    ]
    outputs = llm.generate(asked, PARAMS, use_tqdm=False)
    one = expected(llm, tiny, "hear ", tone(1), " so")
    two = expected(llm, tiny, tone(1), tone(2), " differ")
    found = [(own.prompt_token_ids, own.outputs[0].token_ids) for own in outputs]
    assert found[:4] == [one, one, two, expected(llm, tiny, "text alone")]
    assert found[4][0] == expected(llm, tiny, tone(3))[0]


def test_chat(llm: LLM, tiny: AudioModel) -> None:
    """OpenAI's part and vLLM's; an exact file is the samples themselves."""
    files = [wav(tone(seed), subtype="FLOAT") for seed in (1, 2)]
    encoded = [base64.b64encode(file).decode() for file in files]
    content = [
        {"type": "input_audio", "input_audio": {"data": encoded[0], "format": "wav"}},
        {"type": "text", "text": "and"},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded[1]}"}},
    ]
    (output,) = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False)
    prompt, tokens = expected(llm, tiny, "user: ", tone(1), "and", tone(2), "\nassistant: ")
    assert output.prompt_token_ids == prompt and output.outputs[0].token_ids == tokens


BAD: dict[str, tuple[Any, int, str, str]] = {  # data, places in the prompt, param, code
    "no object": ("x", 1, PATH, "unsupported_content"),
    "video": ({"video": [1]}, 1, PATH, "unsupported_content"),
    "image": ({"image": 1}, 1, PATH, "unsupported_content"),
    "image and audio": ({"image": 1, "audio": tone(1)}, 1, PATH, "unsupported_content"),
    "name of a file": ({"audio": "a.wav"}, 1, f"{PATH}.audio", "invalid_type"),
    "bytes": ({"audio": [b"RIFF"]}, 1, f"{PATH}.audio", "invalid_type"),
    "longer than a window": ({"audio": tone(1, 1.1)}, 1, f"{PATH}.audio", "invalid_audio"),
    "no samples": ({"audio": tone(1)[:0]}, 1, f"{PATH}.audio", "invalid_audio"),
    "too short for a token": ({"audio": tone(1)[:100]}, 1, f"{PATH}.audio", "invalid_audio"),
    "fewer clips": ({"audio": [tone(1)]}, 2, PATH, "invalid_audio_count"),
    "more clips": ({"audio": [tone(1), tone(2)]}, 1, PATH, "invalid_audio_count"),
    "no place": ({"audio": tone(1)}, 0, PATH, "invalid_audio_count"),
    "too many": ({"audio": [tone(1)] * 4}, 4, f"{PATH}.audio", "too_many_audios"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_clips(llm: LLM, name: str) -> None:
    data, places, param, code = BAD[name]
    prompt = {"prompt": "what " + "<|AUDIO|>" * places, "multi_modal_data": data}
    with pytest.raises(InvalidRequest) as refused:
        llm.generate([prompt], PARAMS, use_tqdm=False)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_methods_without_audio(llm: LLM) -> None:
    prompt = {"prompt": "x", "multi_modal_data": {"audio": tone(1)}}
    with pytest.raises(InvalidRequest, match="only generate and chat support clips of audio"):
        llm.beam_search([prompt], BeamSearchParams(2, max_tokens=2))
