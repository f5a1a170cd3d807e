"""``LLM.generate(lora_request=...)``, with peft's own tokens."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from demo_model.evaluate import MODEL_DIR
from peft_adapters import generate, make_adapter
from rayfin import LLM, AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams
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


@pytest.mark.parametrize("named", [True, False], ids=["by name", "of this program"])
def test_a_trainers_tensors(tmp_path: Path, named: bool) -> None:
    """They are the adapter that peft would have written; one that does not fit changes nothing."""
    model = MODEL_DIR
    folders = [make_adapter(model, tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    wanted = [generate(model, folder, PROMPT, 6) for folder in folders]

    async def train() -> None:
        settings = {"dtype": "float32", "kv_cache_memory": 16 << 20}
        served: dict[str, Any] = {"lora_modules": [f"b={folders[0]}"]} if named else {}
        args = AsyncEngineArgs(str(model), enable_lora=True, **served, **settings)
        async with AsyncLLM.from_engine_args(args) as llm:
            before: Any = None
            for folder, tokens in zip(folders, wanted, strict=True):
                config = json.loads((folder / "adapter_config.json").read_text())
                tensors = load_file(folder / "adapter_model.safetensors")
                given = {f"module.{name}": own for name, own in tensors.items()}
                request = await llm.update_adapter("policy", {"head": 1, **given}, config)
                assert await answer(llm, request) == tokens
                assert before is None or await answer(llm, before) == wanted[0]
                before = before or request
            with pytest.raises(InvalidRequest, match="its rank is 4"):
                bad = {name: own[:1] for name, own in tensors.items()}
                await llm.update_adapter("policy", bad, config)
            with pytest.raises(InvalidRequest, match="no name has"):
                await llm.update_adapter("policy", {"head": 1}, config)
            assert await answer(llm, request) == wanted[1]

    asyncio.run(train())


async def answer(llm: AsyncLLM, request: LoRARequest) -> list[int]:
    prompt = {"prompt_token_ids": PROMPT}
    last = [own async for own in llm.generate(prompt, SIX, lora_request=request)][-1]
    return list(last.outputs[0].token_ids)
