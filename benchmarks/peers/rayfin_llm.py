"""Rayfin's ``LLM`` on whole batches: plain, guided by a JSON schema, or embeddings."""

from typing import Any

from peer import Static, serve

import rayfin
from rayfin import LLM, SamplingParams, StructuredOutputs


def load(model: str, settings: dict[str, Any]) -> Static:
    workload = settings.pop("workload", {"name": "generate"})
    if "speculative_config" not in settings:  # as in rayfin_engine.py
        settings.setdefault("spec_method", "none")
    llm = LLM(model, **settings)
    form = None
    if workload["name"] == "guided":
        form = StructuredOutputs(json=workload["schema"], disable_any_whitespace=True)

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        params = [
            SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, structured_outputs=form
            )
            for count in lengths
        ]
        llm.generate(prompts, params, use_tqdm=False)

    def embed(prompts: list[list[int]], lengths: list[int]) -> None:
        llm.embed(prompts, use_tqdm=False)

    run = embed if workload["name"] == "embed" else generate
    return Static(f"rayfin {rayfin.__version__}", run)


if __name__ == "__main__":
    serve(load, workloads=("guided", "embed"))
