"""What `make test` leaves to `make test-all`.

Of a test with several parameters `make test` runs cases in which each pair of their values meets
once. Most faults need no more than two values to show (pairwise testing: D. R. Kuhn, D. R. Wallace,
A. M. Gallo, "Software fault interactions and implications for software testing", IEEE TSE 2004).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

THOROUGH = {
    "tests/actors/model_files/test_gguf_folder.py::test_a_file_that_was": "another broken file",
    "tests/actors/model_files/test_gguf_folder.py::test_tokens_are_those_of_transformers[f32": (
        "q8_0 is converted"
    ),
    "tests/actors/runner/gpu/test_decoder.py::test_experts_are_grouped[gpt_oss": (
        "tests/kernels/triton/test_experts.py has its form, test_experts.py its decoder"
    ),
    "tests/actors/runner/gpu/test_decoder.py::test_experts_are_grouped[qwen3_moe": "another family",
    "tests/actors/runner/gpu/test_decoder.py::test_float16": (
        "tests/kernels/triton has each kernel in 16 bits"
    ),
    "tests/actors/runner/gpu/test_decoder.py::test_logits_agree[granite": "other families",
    "tests/actors/runner/gpu/test_decoder.py::test_logits_agree[olmo2": "other families",
    "tests/actors/runner/gpu/test_decoder.py::test_logits_agree[qwen2": "other families",
    "tests/actors/runner/gpu/test_decoder.py::test_logits_agree[qwen3-": (
        "test_graphs.py and test_prompt_graphs.py have its tokens"
    ),
    "tests/actors/runner/gpu/test_decoder.py::test_tokens_of_a_mixture": "its logits are compared",
    "tests/actors/runner/gpu/test_decoder.py::test_wide_rows_of_weights_are_left_to_torch[gemma3": (
        "another family"
    ),
    "tests/actors/runner/gpu/test_features.py::test_states[qwen3_next]": "another family",
    "tests/actors/runner/gpu/test_features.py::test_drafts": (
        "test_prompt_graphs.py has prompts in graphs"
    ),
    "tests/actors/runner/gpu/test_features.py::test_few_bits[": (
        "test_quant_linear.py has the decoder's logits, test_graphs.py an engine's tokens"
    ),
    "tests/actors/runner/gpu/test_features.py::test_few_bits_made_whole": (
        "test_quant_linear.py makes layers whole"
    ),
    "tests/actors/runner/gpu/test_features.py::test_weights_rounded": (
        "tests/kernels/triton rounds weights"
    ),
    "tests/actors/runner/gpu/test_graphs.py::test_a_restarted": "many interpreted steps",
    "tests/actors/runner/gpu/test_graphs.py::test_rules_and": "test_device_slots.py has the rules",
    "tests/actors/runner/gpu/test_overlap.py::test_log_probabilities_of_queued_steps[1": (
        "several steps a call have more places to keep apart"
    ),
    "tests/actors/runner/gpu/test_overlap.py::test_requests_with_parts_beside_others[images": (
        "test_media_slots.py has its rows, and embeddings go the same way"
    ),
    "tests/actors/runner/gpu/test_overlap.py::test_slots_that_are_taken[1": (
        "several steps a call take slots later still"
    ),
    "tests/actors/runner/gpu/test_overlap.py::test_the_tokens_of_an_engine": (
        "test_graphs.py compares tokens"
    ),
    "tests/actors/runner/gpu/test_pdl.py::test_a_recorded_step_is_a_chain[gemma3": "another family",
    "tests/actors/runner/gpu/test_pdl.py::test_eager": (
        "tests/kernels/triton/test_pdl.py has each kernel"
    ),
    "tests/actors/runner/gpu/test_pdl.py::test_steps_of_more": (
        "tests/kernels/triton/test_pdl.py has each kernel"
    ),
    "tests/actors/runner/gpu/test_prompt_graphs.py::test_the_tokens": (
        "test_graphs.py has an engine's tokens, and here is what layers compute"
    ),
    "tests/actors/runner/gpu/test_prompt_graphs.py::test_steps_with_drafts": (
        "other steps with prompts"
    ),
    "tests/actors/runner/gpu/test_prompt_graphs.py::test_what_eager_layers_compute[gemma3": (
        "another family"
    ),
    "tests/actors/runner/gpu/test_prompt_graphs.py::test_what_eager_layers_compute[mixtral": (
        "another family"
    ),
    "tests/actors/runner/gpu/test_quant_linear.py::test_a_kernel_that_fails": (
        "interpreted decoders"
    ),
    "tests/actors/runner/gpu/test_quant_linear.py::test_logits_of_every_format": (
        "tests/kernels/triton has each format"
    ),
    "tests/actors/runner/gpu/test_quant_linear.py::test_logits_of_the_decoder[fp8": "awq runs",
    "tests/actors/runner/gpu/test_quant_linear.py::test_logits_of_the_decoder[gptq": "awq runs",
    "tests/actors/runner/gpu/test_quant_linear.py::test_logits_of_the_decoder[w8a16": "awq runs",
    "tests/actors/runner/gpu/test_quant_linear.py::test_projections_of_several": (
        "interpreted decoders"
    ),
    "tests/actors/runner/gpu/test_quant_shares.py::test_layers_of_every_format": (
        "tests/kernels/triton has each format"
    ),
    "tests/actors/processes/test_worker_forks.py::test_a_ray_without_forks": (
        "the Ray of tests/e2e has no forks"
    ),
    "tests/benchmarks/test_compare.py::test_guided_answers": "a comparison is one of tokens",
    "tests/benchmarks/test_compare.py::test_rayfin_and_transformers": (
        "tests/actors/runner compares every family with transformers"
    ),
    "tests/benchmarks/test_compare.py::test_vectors": "a comparison is one of tokens",
    "tests/deployments/cli/test_run_batch.py::test_killed": "e2e/test_batches.py kills processes",
    "tests/e2e/test_adapters.py": (
        "a chaos row kills runners with adapters; tests/deployments/adapters loads and swaps them"
    ),
    "tests/e2e/test_ahead.py": "an engine whose supervisor is late; test_serving.py starts servers",
    "tests/e2e/test_batches.py::test_a_batch_survives": (
        "test_rows_of_a_dataset kills a worker, test_faults.py a runner and a scheduler"
    ),
    "tests/e2e/test_chaos.py": "tests/tools/chaos has its parts; `make chaos` has the row",
    "tests/e2e/test_cluster.py": "tests/deployments/serve has the example; test_models.py deploys",
    "tests/e2e/test_disconnects.py": "a storm; test_streams.py has readers that leave",
    "tests/e2e/test_garbage.py": "a storm; test_edge.py sends one of each kind",
    "tests/e2e/test_llm.py::test_executors_share_pages": (
        "tests/actors/runner/pages/test_disk.py reads what another has computed"
    ),
    "tests/e2e/test_llm.py::test_prompts_outlive_their_engine_in_a_notebook_too": (
        "test_faults.py kills a scheduler"
    ),
    "tests/e2e/test_models.py": "test_audio.py and test_pooling.py share an application",
    "tests/e2e/test_parallel.py": "tests/actors/runner/parallel has groups in processes",
    "tests/e2e/test_prompt_embeds.py": (
        "tests/deployments/media has them; test_audio.py sends arrays through Ray's store"
    ),
    "tests/e2e/test_ray_data.py": "test_batches.py answers a Dataset's rows by the application",
    "tests/e2e/test_ray_home.py::test_a_model_answers": (
        "tests/deployments/serve/test_model_service.py starts without a failed model"
    ),
    "tests/e2e/test_ray_home.py::test_variables": "tests/deployments/rayllm has actors' options",
    "tests/e2e/test_ray_home.py::test_an_engine_of_actors": (
        "test_faults.py kills a runner; AsyncLLM over a pool is that of connect"
    ),
    "tests/e2e/test_replicas.py": (
        "tests/deployments/api/responses and tests/actors/metrics have two ingresses in one process"
    ),
    "tests/e2e/test_sampling.py": "tests/actors/runner/sampling has each setting",
    "tests/e2e/test_seeds.py": "test_llm.py has seeds in this process and as actors",
    "tests/e2e/test_serving.py::test_a_load_that_fails": (
        "tests/deployments/serve/test_serving.py has the errors of a start"
    ),
    "tests/e2e/test_serving.py::test_sigterm": "test_from_address stops a server with its streams",
    "tests/e2e/test_spare_runners.py": "tests/actors/scheduler/faults has spares; `make chaos` too",
    "tests/e2e/test_update.py": "a chaos row too; tests/deployments/serve has the order",
    "tests/e2e/test_wheel.py": "builds a wheel; `make test` installs the folder",
    "tests/e2e/test_whisper.py": "tests/deployments/api/audio/test_whisper.py has the routes",
    "tests/e2e/test_wheel_aarch64.py": "compiles every kernel for another machine",
    "tests/examples/test_demo_model.py::test_facts_are_recited_in_bfloat16": "float32 recites them",
    "tests/examples/test_demo_model.py::test_training_never_shows": "the recipe does not change",
    "tests/examples/test_demo_model.py::test_held_out": (
        "test_rayfin_serves asks fewer of the same prompts"
    ),
    "tests/examples/test_demo_model.py::test_rayfin_serves_the_same_answers[int": (
        "tests/actors/runner has few bits"
    ),
    "tests/kernels/cpu/test_arm.py": "compiles all kernels twice and runs them in an emulator",
    "tests/kernels/triton/test_compile.py": "compiles for Hopper; the interpreter runs each kernel",
}
"""Beginnings of names of tests that only `make test-all` runs, and what `make test` has instead."""

Pair = tuple[tuple[str, int], tuple[str, int]]


def why_thorough(nodeid: str) -> str | None:
    """Finds the reason why only `make test-all` runs a test, None if `make test` does."""
    return next((why for name, why in THOROUGH.items() if nodeid.startswith(name)), None)


def few(values: Iterable[Any], count: int) -> list[Any]:
    """Marks all values of a parameter but ``count`` of them, evenly spread, as thorough.

    A tuple has the values of several parameters.
    """
    every = list(values)
    kept = {round(at * (len(every) - 1) / max(1, count - 1)) for at in range(count)}
    mark = pytest.mark.thorough(reason=f"`make test` has {len(kept)} of {len(every)} values")
    cases = [value if isinstance(value, tuple) else (value,) for value in every]
    return [
        value if at in kept else pytest.param(*cases[at], marks=mark)
        for at, value in enumerate(every)
    ]


def covering(cases: Sequence[dict[str, int]]) -> list[int]:
    """Chooses cases that have every pair of values of two parameters that any case has.

    ``cases`` map a parameter's name to the identity of its value. The next one is always that
    with most new pairs, the first of equals.

    Returns:
        Indices of ``cases``, in order. All of them where there are less than three parameters.
    """
    pairs = [set(combinations(sorted(case.items()), 2)) for case in cases]
    left: set[Pair] = set().union(*pairs)
    chosen: list[int] = []
    while left:
        best = max(range(len(cases)), key=lambda at: len(pairs[at] & left))
        chosen.append(best)
        left -= pairs[best]
    singles = [at for at, case in enumerate(cases) if len(case) < 2]
    return sorted({*chosen, *singles})


def without_repeated_pairs(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Finds the cases that a pairwise choice leaves out, of all tests with several parameters."""
    tests: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and getattr(item, "callspec", None) is not None:
            tests[item.nodeid.partition("[")[0], item.originalname].append(item)
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        chosen = covering(
            [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
        )
        left_out |= set(cases) - {cases[at] for at in chosen}
    return left_out
