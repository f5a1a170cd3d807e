"""``LLM.generate`` with Whisper, whose prompts need not say where the clip is."""

from collections.abc import Iterator
from typing import Any

import pytest

from audio_models import tone
from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidRequest
from whisper_models import IDS, PAGE_SIZE, RATE, WhisperOracle

OUTPUT = 8
PARAMS = SamplingParams(temperature=0, max_tokens=OUTPUT)
CONTROL = "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"
CLIP = tone(1, 1.5)
AUDIO = {"audio": (CLIP, RATE)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> WhisperOracle:
    return WhisperOracle(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(tiny: WhisperOracle) -> Iterator[LLM]:
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_cache_memory": 10**6}
    with LLM(str(tiny.folder), page_size=PAGE_SIZE, **settings) as llm:
        # OpenAI's tokenizers put control tokens around a text.
        llm.get_tokenizer().backend_tokenizer.post_processor = _around()
        yield llm


def _around() -> Any:
    from tokenizers.processors import TemplateProcessing

    names = ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")
    template = f"{names[0]} {names[1]} $A {names[2]}"
    return TemplateProcessing(single=template, special_tokens=[(name, IDS[name]) for name in names])


def test_prompts(llm: LLM, tiny: WhisperOracle) -> None:
    """A text, with the place and without; token ids; and none, which is the start alone."""
    whole = tiny.prompts.ask("de", "transcribe", "", times=False)
    place = tiny.processor.token
    asked: list[Any] = [
        {"prompt": CONTROL, "multi_modal_data": AUDIO},
        {"prompt": place + CONTROL, "multi_modal_data": AUDIO},
        {"prompt_token_ids": whole[1:], "multi_modal_data": AUDIO},
        {"prompt_token_ids": whole, "multi_modal_data": {"audio": [CLIP]}},
        {"encoder_prompt": {"prompt": "", "multi_modal_data": AUDIO}, "decoder_prompt": CONTROL},
        {"encoder_prompt": {"multi_modal_data": AUDIO}, "decoder_prompt": {"prompt": CONTROL}},
        {"encoder_prompt": {"multi_modal_data": AUDIO}, "decoder_prompt": whole[1:]},
    ]
    outputs = llm.generate(asked, PARAMS, use_tqdm=False)
    shown = tiny.processor.process(CLIP).ids + whole[1:]
    assert [own.prompt_token_ids for own in outputs] == [shown] * len(asked)
    expected = tiny.greedy(whole, CLIP, OUTPUT)
    assert [own.outputs[0].token_ids for own in outputs] == [expected] * len(asked)


@pytest.mark.parametrize("prompt", [{"prompt": ""}, {"prompt_token_ids": []}])
def test_an_empty_prompt(llm: LLM, tiny: WhisperOracle, prompt: dict[str, Any]) -> None:
    (output,) = llm.generate(
        [{**prompt, "multi_modal_data": AUDIO}],
        SamplingParams(temperature=0, max_tokens=1),
        use_tqdm=False,
    )
    assert output.outputs[0].token_ids == [tiny.language(CLIP)]


BAD: dict[str, tuple[Any, str]] = {  # prompt, code
    "no clip": (CONTROL, "unsupported_content"),
    "two clips": ({"prompt": CONTROL, "multi_modal_data": {"audio": [CLIP] * 2}},
        "invalid_audio_count"),
    "a clip behind": ({"prompt": CONTROL + "<|startoflm|>", "multi_modal_data": AUDIO},
        "unsupported_content"),
    "nothing": ({"prompt": ""}, "empty_prompt"),
    "no clips": ({"prompt": "", "multi_modal_data": {}}, "empty_prompt"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_prompts(llm: LLM, name: str) -> None:
    prompt, code = BAD[name]
    with pytest.raises(InvalidRequest) as refused:
        llm.generate([prompt], PARAMS, use_tqdm=False)
    assert refused.value.code == code


@pytest.mark.parametrize(
    "encoder", [None, "text", {"prompt": "text", "multi_modal_data": AUDIO}, {"prompt": ""}]
)
def test_bad_prompts_in_two_parts(llm: LLM, encoder: Any) -> None:
    bad = {"encoder_prompt": encoder, "decoder_prompt": CONTROL}
    with pytest.raises(InvalidRequest, match=r"prompt\[0\].encoder_prompt has multi_modal_data"):
        llm.generate([bad], PARAMS, use_tqdm=False)
