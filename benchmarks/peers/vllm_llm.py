"""vLLM's ``LLM`` on whole batches: plain, guided by a JSON schema, or embeddings."""

import os
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
# GiB of its pages, on a CPU: else it wants nearly all memory, and other engines have some of it.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

import vllm
from peer import Static, serve
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def load(model: str, settings: dict[str, Any]) -> Static:
    workload = settings.pop("workload", {"name": "generate"})
    embeds = workload["name"] == "embed"
    defaults: dict[str, Any] = {"dtype": "float32"} | ({"runner": "pooling"} if embeds else {})
    llm = LLM(model, **defaults | settings)
    form = None
    if workload["name"] == "guided":
        form = StructuredOutputsParams(json=workload["schema"], disable_any_whitespace=True)

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, structured_outputs=form
            )
            for count in lengths
        ]
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def embed(prompts: list[list[int]], lengths: list[int]) -> None:
        llm.embed([{"prompt_token_ids": ids} for ids in prompts], use_tqdm=False)

    return Static(f"vllm {vllm.__version__}", embed if embeds else generate)


if __name__ == "__main__":
    serve(load, workloads=("guided", "embed"))
