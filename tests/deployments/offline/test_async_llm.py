"""``AsyncLLM`` in this process: against ``LLM``, and what ends a request early."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest
from ray import serve
from ray.serve.schema import ApplicationStatus

from pooling_models import TEXTS, make_encoder
from rayfin import LLM, AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from rayfin.actors.errors import EngineUnavailable, InvalidConfig, InvalidRequest
from rayfin.actors.scheduler.engine import Engine
from rayfin.deployments.client.engine_names import INGRESS
from rayfin.deployments.offline.async_engines import ModelSource
from rayfin.deployments.offline.connect import ServedModel
from rayfin.deployments.offline.local_client import LocalClient
from rayfin.deployments.serve.model_args import one_model

T = TypeVar("T")

SETTINGS: dict[str, Any] = {"threads": 1, "kv_cache_memory": 16 * 2**20}
PROMPTS = [f"What is {number} + {number * 7 % 50}?" for number in range(24)]
LONG = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0)
TALK = [{"role": "user", "content": "What is 3 + 4?"}]


class Program:
    """An AsyncLLM and the event loop that uses it."""

    def __init__(self, runner: asyncio.Runner, **settings: Any) -> None:
        self._runner = runner
        args = AsyncEngineArgs("demo", max_num_seqs=16, **(SETTINGS | settings))
        self.llm = AsyncLLM.from_engine_args(args)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def each(self, params: SamplingParams) -> list[list[Any]]:
        """All outputs of each prompt, asked side by side."""

        async def all_at_once() -> list[list[Any]]:
            asked = [every(self.llm.generate(prompt, params)) for prompt in PROMPTS]
            return list(await asyncio.gather(*asked))

        return self.run(all_at_once())

    async def idle(self) -> bool:
        """Whether the engine comes to have no request."""
        service = await self.llm._service()
        for _ in range(200):
            (report,) = await service.client.engines()
            if not report.stats.running + report.stats.waiting:
                return True
            await asyncio.sleep(0.01)
        return False


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with asyncio.Runner() as runner:
        program = Program(runner)
        yield program
        program.llm.shutdown()


@pytest.fixture(scope="module")
def solo() -> Iterator[LLM]:
    with LLM("demo", **SETTINGS) as llm:
        yield llm


async def every(outputs: AsyncGenerator[T, None]) -> list[T]:
    return [output async for output in outputs]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_outputs_add_up_to_those_of_llm(
    program: Program, solo: LLM, kind: RequestOutputKind
) -> None:
    settings: dict[str, Any] = {"seed": 5, "n": 2, "max_tokens": 12, "logprobs": 2}
    params = SamplingParams(**settings, stop=["9"], output_kind=kind)
    expected = solo.generate(PROMPTS, params, use_tqdm=False)
    for outputs, whole in zip(program.each(params), expected, strict=True):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for wanted in whole.outputs:
            parts = [part for one in outputs for part in one.outputs if part.index == wanted.index]
            last = parts[-1]
            if kind is RequestOutputKind.DELTA:
                text = "".join(part.text for part in parts)
                ids = [token for part in parts for token in part.token_ids]
                logprobs = [entry for part in parts for entry in part.logprobs]
            else:
                text, ids, logprobs = last.text, last.token_ids, last.logprobs
            assert (text, ids, logprobs) == (wanted.text, wanted.token_ids, wanted.logprobs)
            assert last.finish_reason == wanted.finish_reason
            assert last.stop_reason == wanted.stop_reason
            assert last.cumulative_logprob == pytest.approx(wanted.cumulative_logprob)
        assert outputs[-1].prompt_token_ids == whole.prompt_token_ids
    if kind is RequestOutputKind.FINAL_ONLY:
        assert all(len(outputs) == 1 for outputs in program.each(params))


def test_prompts_scores_and_the_best_of_several_are_those_of_llm(
    program: Program, solo: LLM
) -> None:
    params = SamplingParams(seed=1, n=2, best_of=4, max_tokens=6, prompt_logprobs=1)
    prompt = {"prompt_token_ids": [5, 6, 7, 8]}
    (expected,) = solo.generate(prompt, params, use_tqdm=False)
    (output,) = program.run(every(program.llm.generate(prompt, params)))
    assert [own.token_ids for own in output.outputs] == [own.token_ids for own in expected.outputs]
    assert output.prompt_logprobs == expected.prompt_logprobs
    long = {"prompt_token_ids": [5] * 200}
    scored = SamplingParams(max_tokens=3, prompt_logprobs=1, ignore_eos=True, output_kind=1)
    outputs = program.run(every(program.llm.generate(long, scored)))
    assert all(output.outputs[0].token_ids for output in outputs)  # none is a part of the prompt


def test_a_form_holds(program: Program) -> None:
    params = SamplingParams(
        structured_outputs={"choice": ["zebra", "lion"]}, max_tokens=40, output_kind=2
    )
    (output,) = program.run(every(program.llm.generate("An animal:", params)))
    assert output.outputs[0].text in ("zebra", "lion")


def test_a_chat_and_its_pieces_are_those_of_llm(program: Program, solo: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    (expected,) = solo.chat(TALK, params, use_tqdm=False)
    outputs = program.run(every(program.llm.chat(TALK, params)))
    assert outputs[-1].outputs[0].text == expected.outputs[0].text
    assert outputs[-1].prompt_token_ids == expected.prompt_token_ids
    pieces = program.run(every(program.llm.stream(TALK, params)))
    assert len(pieces) > 1
    assert "".join(pieces) == expected.outputs[0].text
    one, several = (SamplingParams(seed=3, max_tokens=24, n=n) for n in (1, 2))
    (drawn,) = solo.chat(TALK, one, use_tqdm=False)
    pieces = program.run(every(program.llm.stream(TALK, several)))  # of one answer all the same
    assert "".join(pieces) == drawn.outputs[0].text
    (plain,) = solo.generate("Once", params, use_tqdm=False)
    assert "".join(program.run(every(program.llm.stream("Once", params)))) == plain.outputs[0].text


def test_requests_end_when_they_are_aborted_cancelled_or_left(program: Program) -> None:
    llm = program.llm

    async def work() -> None:
        ended: list[Any] = []

        async def read(name: str) -> None:
            async for output in llm.generate("a b c", LONG, name):
                ended.append(output)

        aborted, dropped = (asyncio.create_task(read(name)) for name in ("one", "two"))
        while not ended:
            await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="'one' runs"):
            await anext(llm.generate("x", LONG, "one"))
        await llm.abort(["one", "unknown"])
        await aborted
        last = [output for output in ended if output.request_id == "one"][-1]
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        dropped.cancel()
        await asyncio.gather(dropped, return_exceptions=True)
        left = llm.generate("a b c", LONG)
        await anext(left)
        await left.aclose()
        assert await program.idle()

    program.run(work())


def test_an_answer_that_is_read_at_its_end_is_that_of_llm(program: Program, solo: LLM) -> None:
    """Also beside streams, and those of requests that end before."""
    params = SamplingParams(seed=5, max_tokens=40, n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    stopped = SamplingParams(seed=5, max_tokens=40, stop=["1"], output_kind=2)
    expected = solo.generate(PROMPTS, params, use_tqdm=False)
    cut = solo.generate(PROMPTS, stopped, use_tqdm=False)
    long = LONG.clone()
    long.output_kind = RequestOutputKind.FINAL_ONLY

    async def work() -> None:
        llm = program.llm
        streamed = asyncio.create_task(every(llm.generate("a b c", LONG, "streamed")))
        aborted = asyncio.create_task(every(llm.generate("a b c", long, "aborted")))
        dropped = asyncio.create_task(every(llm.generate("a b c", long)))
        asked = [every(llm.generate(text, each)) for text in PROMPTS for each in (params, stopped)]
        outputs = await asyncio.gather(*asked)
        for (output,), wanted in zip(outputs[::2] + outputs[1::2], expected + cut, strict=True):
            for choice, other in zip(output.outputs, wanted.outputs, strict=True):
                assert (choice.text, choice.token_ids) == (other.text, other.token_ids)
                assert choice.finish_reason == other.finish_reason
                assert choice.stop_reason == other.stop_reason
        dropped.cancel()
        await llm.abort(["streamed", "aborted"])
        (whole,) = await aborted
        parts = await streamed
        assert whole.outputs[0].finish_reason == "abort"
        known = min(len(whole.outputs[0].token_ids), len(parts[-1].outputs[0].token_ids))
        assert known > 40  # the tokens so far
        assert whole.outputs[0].token_ids[:known] == parts[-1].outputs[0].token_ids[:known]
        assert whole.outputs[0].text
        assert await program.idle()

    program.run(work())
    client = program.run(program.llm._service()).client
    assert isinstance(client, LocalClient)
    assert client._whole.begun() == []
    assert client._names == {} == client._streams


def test_a_bad_request_harms_no_other(program: Program) -> None:
    async def work() -> None:
        good = asyncio.create_task(every(program.llm.generate("a", LONG.from_optional())))
        with pytest.raises(InvalidRequest):
            await anext(program.llm.generate("", LONG))
        with pytest.raises(InvalidRequest):
            await anext(program.llm.generate("a", SamplingParams(min_tokens=16, max_tokens=5)))
        assert (await good)[-1].finished

    program.run(work())
    assert program.llm.is_running
    assert not program.llm.errored


def test_the_http_api_answers_in_this_process(program: Program) -> None:
    async def work() -> Any:
        transport = httpx.ASGITransport(await program.llm.asgi_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            body = {"messages": TALK, "temperature": 0, "max_tokens": 24}
            return (await client.post("/v1/chat/completions", json=body)).json()

    answer = program.run(work())
    params = SamplingParams(temperature=0, max_tokens=24)
    outputs = program.run(every(program.llm.chat(TALK, params)))
    assert answer["choices"][0]["message"]["content"] == outputs[-1].outputs[0].text


def test_it_sleeps_and_wakes(program: Program) -> None:
    async def work() -> None:
        llm = program.llm
        params = SamplingParams(temperature=0, max_tokens=4, output_kind=2)
        (before,) = await every(llm.generate("a b", params))
        await llm.sleep()
        assert await llm.is_sleeping()
        waits = asyncio.create_task(every(llm.generate("a b", params)))
        await llm.wake_up()
        (after,) = await waits
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert await llm.reset_prefix_cache()
        await llm.check_health()
        assert await llm.get_supported_tasks() == ("generate",)

    program.run(work())


def test_vectors_are_those_of_llm(tmp_path: Path) -> None:
    folder = str(make_encoder(tmp_path / "bert"))
    expected = LLM(folder, threads=1).encode(TEXTS[:2], use_tqdm=False)

    async def work() -> list[Any]:
        async with AsyncLLM.from_engine_args(AsyncEngineArgs(folder, threads=1)) as llm:
            return [await anext(llm.encode(text)) for text in TEXTS[:2]]

    for output, wanted in zip(asyncio.run(work()), expected, strict=True):
        assert np.array_equal(output.outputs.data, wanted.outputs.data)
        assert output.prompt_token_ids == wanted.prompt_token_ids


def test_its_end_and_its_loop_are_kept() -> None:
    with asyncio.Runner() as runner:
        program = Program(runner)
        assert program.run(program.idle())
        with pytest.raises(RuntimeError, match="event loop"):
            asyncio.run(program.llm.check_health())

        async def work() -> list[Any]:
            transport = httpx.ASGITransport(
                await program.llm.asgi_app(), raise_app_exceptions=False
            )
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True}
                running = asyncio.create_task(every(program.llm.generate("a", LONG)))
                posted = asyncio.create_task(client.post("/v1/completions", json=body))
                await asyncio.sleep(0.1)
                cut = SamplingParams(truncate_prompt_tokens=10)
                prepared = asyncio.create_task(every(program.llm.generate("x" * 20_000, cut)))
                await asyncio.sleep(0)
                program.llm.shutdown()
                with pytest.raises(EngineUnavailable, match="closed"):
                    await prepared
                assert (await posted).status_code == 503
                assert (await client.post("/v1/completions", json=body)).status_code == 503
                return await running

        assert program.run(work())[-1].outputs[0].finish_reason == "abort"
        assert not program.llm.is_running
        with pytest.raises(RuntimeError, match="shut down"):
            program.run(program.llm.check_health())


def test_models_open_side_by_side_and_an_end_meanwhile_is_said() -> None:
    async def work() -> None:
        args = AsyncEngineArgs("demo", **SETTINGS)
        llms = [AsyncLLM.from_engine_args(args) for _ in range(3)]
        opening = [asyncio.create_task(llm.check_health()) for llm in llms]
        await asyncio.sleep(0.01)
        opening[0].cancel()  # the first caller, for whom the others do not wait alone
        llms[2].shutdown()
        with pytest.raises(RuntimeError, match="shut down"):
            await opening[2]
        await opening[1]
        await llms[0].check_health()
        for llm in llms:
            llm.shutdown()

    asyncio.run(work())


def test_what_cannot_be_opened_is_closed() -> None:
    class Broken(ModelSource):
        closed = 0

        async def open(self) -> Any:
            raise InvalidConfig("no room")

        def close(self) -> None:
            self.closed += 1

    async def work() -> None:
        llm = AsyncLLM(source := Broken())
        with pytest.raises(InvalidConfig, match="no room"):
            await llm.__aenter__()
        assert source.closed == 1

    asyncio.run(work())


def test_an_application_that_has_failed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    door = SimpleNamespace(replica_states={})
    app = SimpleNamespace(
        status=ApplicationStatus.DEPLOY_FAILED, message="no GPU", deployments={INGRESS: door}
    )
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={"app": app}))
    with pytest.raises(ValueError, match="'app' has failed: no GPU"):
        asyncio.run(ServedModel("app", None).open())


def test_an_engine_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with asyncio.Runner() as runner:
        program = Program(runner)
        program.run(program.idle())
        monkeypatch.setattr(Engine, "step", lambda self: 1 / 0)
        with pytest.raises(EngineUnavailable, match="ZeroDivisionError"):
            program.run(every(program.llm.generate("a", LONG)))
        assert program.llm.errored
        assert not program.llm.is_running
        assert "ZeroDivisionError" in str(program.llm.dead_error)
        program.llm.shutdown()


def test_settings_have_vllms_names_or_the_nearest_is_said() -> None:
    model = one_model(
        {"max_num_seqs": 4, "tool_call_parser": "hermes", "enable_prefix_caching": False}
    )
    assert (model.engine.max_decoding_batch, model.engine.prefix_caching) == (4, False)
    assert model.server.tool_call_parser == "hermes"
    with pytest.raises(InvalidConfig, match="near it is max_num_seqs"):
        AsyncEngineArgs("demo", max_num_seq=4)
    with pytest.raises(InvalidConfig, match="executor must be"):
        AsyncLLM.from_engine_args(AsyncEngineArgs("demo"), executor="mp")
    with pytest.raises(InvalidConfig, match="no folder"):
        AsyncLLM.from_engine_args(AsyncEngineArgs("/nowhere/at/all"))


def test_what_is_missing_says_what_works(program: Program) -> None:
    with pytest.raises(NotImplementedError, match="update_weights"):
        program.llm.init_weight_transfer_engine()
    with pytest.raises(AttributeError):
        _ = program.llm.nothing
