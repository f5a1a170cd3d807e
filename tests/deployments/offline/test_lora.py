"""``LLM.generate(lora_request=...)``, with peft's own tokens."""

from pathlib import Path
from typing import Any

import pytest

from peft_adapters import generate, make_adapter
from rayfin import LLM, LoRARequest, SamplingParams
from rayfin.actors.errors import InvalidRequest, NotFound

PROMPT = [5, 9, 3, 77, 20, 11]
SIX = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def test_prompts_of_one_batch_have_their_adapters(tiny_model: Any, tmp_path: Path) -> None:
    model = tiny_model("llama").folder
    folder = make_adapter(model, tmp_path / "a", seed=1)
    settings = {"dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory": 10**6}
    with LLM(str(model), enable_lora=True, max_loras=2, **settings) as llm:
        request = LoRARequest("a", 1, str(folder))
        both = llm.generate([PROMPT, PROMPT], SIX, lora_request=[None, request], use_tqdm=False)
        first = [list(one.outputs[0].token_ids) for one in both]
        assert first == [generate(model, None, PROMPT, 6), generate(model, folder, PROMPT, 6)]
        make_adapter(model, folder, seed=2)  # another version at the same path
        again = llm.generate(PROMPT, SIX, lora_request=request, use_tqdm=False)
        assert list(again[0].outputs[0].token_ids) == generate(model, folder, PROMPT, 6)
        assert list(again[0].outputs[0].token_ids) != first[1]
        with pytest.raises(NotFound, match="no such folder"):
            llm.generate(PROMPT, SIX, lora_request=LoRARequest("b", 1, "/nowhere"))
        with pytest.raises(InvalidRequest, match="2 prompts and 1 lora_request"):
            llm.generate([PROMPT, PROMPT], SIX, lora_request=[request])
    with LLM(str(model), **settings) as llm, pytest.raises(InvalidRequest, match="enable-lora"):
        llm.generate(PROMPT, SIX, lora_request=request, use_tqdm=False)
