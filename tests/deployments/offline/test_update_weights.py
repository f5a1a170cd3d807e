"""New weights for an engine in this process, between calls and under running requests."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import EngineRequest, Sampling, StopRules, TokenDelta
from rayfin.actors.weights.spans import SpanLog
from rayfin.deployments.client.weights import UpdateOptions
from rayfin.deployments.offline.async_llm import AsyncEngineArgs, AsyncLLM
from rayfin.deployments.offline.llm import LLM, SamplingParams
from rayfin.deployments.offline.local_client import LocalClient
from rayfin.deployments.offline.outputs import RequestOutput
from rayfin.deployments.offline.weights import LocalWeights

PROMPTS = [[5, 9, 13, 21], [5, 9, 13, 21, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52], [7]]
NAME = "model.layers.1.mlp.up_proj.weight"
SETTINGS: dict[str, Any] = {"device": "cpu", "threads": 1, "num_pages": 256, "page_size": 4}


@pytest.fixture(scope="module")
def folders(tiny_models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("versions")
    for seed in range(3):
        tiny_models.make_tiny_model("qwen3", folder / str(seed), seed=seed)
    return [folder / str(seed) for seed in range(3)]


def model(folder: Path) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, **SETTINGS)


def greedy(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [own.outputs[0].token_ids for own in llm.generate(prompts, params, use_tqdm=False)]


def test_between_calls(folders: list[Path], tmp_path: Path) -> None:
    with model(folders[1]) as fresh:
        wanted = greedy(fresh)
    with model(folders[0]) as llm:
        first = greedy(llm)
        report = llm.update_weights(str(folders[1]), "step-1")
        assert (report["serial"], report["version"], report["how"]) == (1, "step-1", "in place")
        assert greedy(llm) == wanted != first  # no cached prefix is of the old weights
        assert llm.stats().weights[0] == "step-1" and llm.stats().weight_serial == 1
        with pytest.raises(InvalidRequest, match="lack"):
            llm.update_weights({NAME: load_one(folders[0])})
        assert greedy(llm) == wanted
        llm.update_weights({NAME: load_one(folders[0])}, partial=True)
        assert greedy(llm) != wanted
        llm.update_weights(load_file(folders[1] / "model.safetensors"))
        assert greedy(llm) == wanted and llm.stats().weight_serial == 3
        llm.check_integrity()


def test_a_sleep_of_level_2(folders: list[Path]) -> None:
    """It has no weights; what is served is loaded again, or new weights are."""
    with model(folders[1]) as fresh:
        wanted = greedy(fresh)
    with model(folders[0]) as llm:
        first, runner = greedy(llm), llm._engine._weights._executor._runner  # type: ignore[attr-defined]
        llm.sleep(level=2)
        llm.sleep(level=2)
        assert not runner.is_loaded
        llm.wake_up(tags=["weights"])
        assert runner.is_loaded
        llm.wake_up(tags=["kv_cache"])
        assert greedy(llm) == first
        llm.update_weights(str(folders[1]))
        for _ in range(2):
            llm.sleep(level=2)
            llm.wake_up()
            assert greedy(llm) == wanted  # no base instead, and no garbage
        llm.sleep(level=2)
        with pytest.raises(InvalidRequest, match="lack"):
            llm.update_weights({NAME: load_one(folders[0])})
        llm.update_weights(str(folders[0]))
        llm.wake_up()
        assert greedy(llm) == first


def load_one(folder: Path) -> Any:
    return load_file(folder / "model.safetensors")[NAME]


def request_of(number: int, prompt: list[int], seed: int, temperature: float) -> EngineRequest:
    return EngineRequest(
        request_id=str(number),
        prompt=np.array(prompt, np.int32),
        sampling=Sampling(temperature=temperature, seed=seed, logprobs=0),
        stopping=StopRules(40),
        key=number,
    )


async def rollouts(
    folders: list[Path], mode: Any, kv: Any, after: int
) -> list[tuple[EngineRequest, list[TokenDelta]]]:
    """Streams over an engine that gets two versions amid them, in one pause.

    While the second one is written the streams would end by the first one on a fast machine.
    """
    client = await LocalClient.load(EngineArgs(model=str(folders[0]), **SETTINGS))
    requests = [request_of(n, ids, n, float(n % 2)) for n, ids in enumerate(PROMPTS * 2)]
    got: list[list[TokenDelta]] = [[] for _ in requests]
    begun = asyncio.Event()

    async def read(number: int) -> None:
        async for delta in client.stream(requests[number]):
            got[number].append(delta)
            if sum(len(own.tokens) for own in got[0]) > after:
                begun.set()

    readers = [asyncio.create_task(read(number)) for number in range(len(requests))]
    await begun.wait()
    await client.weights.pause(mode)
    for seed in (1, 2):
        await client.weights.update(str(folders[seed]), f"step-{seed}", UpdateOptions(mode, kv))
    await client.weights.resume()
    await asyncio.gather(*readers)
    client.close()
    return list(zip(requests, got, strict=True))


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_under_running_requests(folders: list[Path], mode: Any) -> None:
    """Each span's tokens and log probabilities are those of a fresh engine of its version."""
    answers = asyncio.run(rollouts(folders, mode, "recompute", after=2))
    fresh = {"default": folders[0], "step-1": folders[1], "step-2": folders[2]}
    seen = set()
    for label, folder in fresh.items():
        with model(folder) as llm:
            for request, deltas in answers:
                seen |= check_span(llm, label, request, deltas)
    assert "step-2" in seen if mode == "keep" else seen == {"default"}
    ends = {deltas[-1].finish_reason for _, deltas in answers}
    assert ends == ({"abort"} if mode == "abort" else {"length"})


def check_span(llm: LLM, label: str, request: EngineRequest, deltas: list[TokenDelta]) -> set[str]:
    log, tokens, logprobs = SpanLog(), list[int](), list[float]()
    for delta in deltas:
        log.add(delta.weights, len(delta.tokens), kept=delta.kept)
        tokens += delta.tokens
        logprobs += [own.logprob for own in delta.logprobs or []]
    if mode_is_whole := (deltas[-1].finish_reason == "length"):
        assert len(tokens) == 40
    whole = request.prompt.tolist() + tokens
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (scored,) = llm.generate([{"prompt_token_ids": whole}], params, use_tqdm=False)
    at, seen = 0, set()
    for span in log.spans:
        if span.label == label:
            seen.add(label)
            for index in range(at, at + span.tokens):
                position = len(request.prompt) + index
                assert scored.prompt_logprobs is not None
                own = scored.prompt_logprobs[position]
                assert own is not None and own[whole[position]].logprob == logprobs[index]
        at += span.tokens
    assert at == len(tokens) and (mode_is_whole or tokens is not None)
    return seen


def test_kept_pages_are_said_and_shared_with_nobody(folders: list[Path]) -> None:
    answers = asyncio.run(rollouts(folders, "keep", "keep", after=2))
    for _, deltas in answers:
        labels = [(delta.weights, delta.kept) for delta in deltas if delta.tokens]
        assert ("default", False) in labels or labels[0][0] == "step-2"
        assert all(kept for label, kept in labels if label != "default")
        assert deltas[-1].finish_reason == "length"


def test_a_model_that_is_loaded_anew(tiny_models: ModuleType, tmp_path: Path) -> None:
    for seed in range(2):
        tiny_models.make_tiny_model("mixtral", tmp_path / str(seed), seed=seed)
    with model(tmp_path / "1") as fresh:
        wanted = greedy(fresh)
    with model(tmp_path / "0") as llm:
        assert greedy(llm) != wanted
        report = llm.update_weights(load_file(tmp_path / "1" / "model.safetensors"))
        assert report["how"] == "restart" and greedy(llm) == wanted


def test_a_program_of_coroutines(folders: list[Path]) -> None:
    async def program() -> None:
        args = AsyncEngineArgs(str(folders[0]), **SETTINGS)
        async with AsyncLLM.from_engine_args(args) as llm:
            assert await llm.get_weight_version() == "default"
            report = await llm.update_weights(str(folders[1]), "step-1")
            assert report["engines"] == 1 and await llm.get_weight_version() == "step-1"
            await llm.pause_generation(mode="keep")
            assert await llm.is_paused()
            await llm.resume_generation()
            assert not await llm.is_paused()

    asyncio.run(program())


def test_a_pause_by_hand_outlasts_an_update(folders: list[Path], tmp_path: Path) -> None:
    """One that is refused, too."""

    async def program() -> None:
        client = await LocalClient.load(EngineArgs(model=str(folders[0]), **SETTINGS))
        await client.weights.pause("keep")
        await client.weights.update(str(folders[1]), "step-1")
        with pytest.raises(InvalidRequest):
            await client.weights.update(str(tmp_path))
        (state,) = (await client.weights.states()).values()
        assert state.paused and state.version.label == "step-1"
        await client.weights.resume()
        (state,) = (await client.weights.states()).values()
        assert not state.pausing
        client.close()

    asyncio.run(program())


def test_a_program_that_ends_without_a_word_leaves_no_versions(tmp_path: Path) -> None:
    local = LocalWeights(EngineArgs(weight_dir=str(tmp_path / "versions")), None)  # type: ignore[arg-type]
    folder = local.store.folder
    local.store.touch()
    assert folder.exists()
    del local
    assert not folder.exists()


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_an_answer_that_is_read_at_its_end_has_the_same_versions(
    folders: list[Path], kv: Any
) -> None:
    def ask(llm: AsyncLLM, kind: int) -> AsyncGenerator[RequestOutput, None]:
        params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, output_kind=kind)
        return llm.generate({"prompt_token_ids": PROMPTS[0]}, params)

    async def whole(llm: AsyncLLM) -> RequestOutput:
        (output,) = [output async for output in ask(llm, 2)]
        return output

    async def program() -> None:
        args = AsyncEngineArgs(str(folders[0]), **SETTINGS)
        async with AsyncLLM.from_engine_args(args) as llm:
            # Both begin in one step, so the pause below cuts them at the same token.
            await llm.pause_generation(mode="keep", clear_cache=False)
            client = llm._source._client
            assert isinstance(client, LocalClient)
            first, parts = asyncio.create_task(whole(llm)), ask(llm, 0)
            second = asyncio.create_task(anext(parts))
            while len(client._streams) < 2:
                await asyncio.sleep(0.001)
            await llm.resume_generation()
            seen = [await second]
            for _ in range(2):
                seen.append(await anext(parts))
            await llm.pause_generation(mode="keep", clear_cache=False)
            await llm.update_weights(str(folders[1]), "step-1", kv=kv)
            await llm.resume_generation()
            seen += [output async for output in parts]
            output, other = (await first).outputs[0], seen[-1].outputs[0]
            assert output.token_ids == other.token_ids and len(output.token_ids) == 150
            assert output.weight_versions == other.weight_versions
            assert {span["version"] for span in other.weight_versions or ()} == {
                "default",
                "step-1",
            }
            assert client._whole.begun() == [] and client._names == {}

    asyncio.run(program())
