"""The offline LLM: the same tokens in one process and as actors, under vLLM's names."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from rayfin import LLM, SamplingParams
from rayfin.actors.errors import ContextLengthExceeded, InvalidRequest
from rayfin.deployments.offline.outputs import CompletionOutput, RequestOutput

PROMPTS = [
    "A robot may not injure a human being",
    "To be or not to be,",
    "What is the meaning of life?",
    "One " * 60,
]
LENGTH = 40
SAMPLED = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "max_tokens": LENGTH}
SETTINGS: dict[str, list[SamplingParams]] = {
    "greedy": [SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)] * 4,
    "seeded": [SamplingParams(seed=seed, **SAMPLED) for seed in range(4)],
    "choices": [SamplingParams(n=2, seed=5, **SAMPLED)] * 4,
    "mixed": [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(seed=1, min_p=0.1, min_tokens=10, max_tokens=20),
        SamplingParams(n=3, seed=2, max_tokens=LENGTH, stop=["e", "zq"]),
        SamplingParams(temperature=0, max_tokens=LENGTH, stop_token_ids=list(range(100, 900))),
    ],
}

SEED_PROGRAM = """
from vllm import LLM, SamplingParams


prompts = [
    ("A robot may not injure a human being",
     SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
    ("To be or not to be,",
     SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    ("What is the meaning of life?",
     SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
]
prompts, sampling_paras = zip(*prompts)

llm = LLM(model="Qwen/Qwen2.5-3B-Instruct")

outputs = llm.generate(prompts, sampling_paras)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""


def choices(outputs: list[RequestOutput]) -> list[list[CompletionOutput]]:
    return [output.outputs for output in outputs]


@pytest.mark.parametrize("name", SETTINGS)
def test_executors_agree(name: str, solo: LLM, actors: LLM) -> None:
    here = solo.generate(PROMPTS, SETTINGS[name], use_tqdm=False)
    there = actors.generate(PROMPTS, SETTINGS[name], use_tqdm=False)
    assert choices(here) == choices(there)
    assert all(choice.token_ids for output in here for choice in output.outputs)


def test_outputs_have_vllm_names(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    first, second = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert [first.prompt, second.prompt] == PROMPTS[:2]
    assert first.prompt_token_ids == tokenizer.encode(PROMPTS[0])
    assert first.finished and int(first.request_id) < int(second.request_id)
    choice = first.outputs[0]
    assert choice.index == 0 and len(choice.token_ids) == 5
    assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert (choice.finish_reason, choice.stop_reason, choice.logprobs) == ("length", None, None)


def test_prompts_come_in_every_form(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    ids = llm.get_tokenizer().encode(PROMPTS[1])
    forms: list[Any] = [
        *(PROMPTS[1], [PROMPTS[1]], (PROMPTS[1],), {"prompt": PROMPTS[1]}),
        *(ids, [ids], {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]),
    ]
    answers = [choices(llm.generate(form, params, use_tqdm=False)) for form in forms]
    assert answers == [answers[0]] * len(forms)


def test_choices_are_the_seeds_that_follow(llm: LLM) -> None:
    params = {"temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    both = llm.generate(PROMPTS[0], SamplingParams(n=2, seed=7, **params), use_tqdm=False)[0]
    alone = [
        llm.generate(PROMPTS[0], SamplingParams(seed=seed, **params), use_tqdm=False)[0]
        for seed in (7, 8)
    ]
    assert [choice.token_ids for choice in both.outputs] == [
        output.outputs[0].token_ids for output in alone
    ]
    assert both.outputs[0].token_ids != both.outputs[1].token_ids
    assert [choice.index for choice in both.outputs] == [0, 1]


def test_stop_string_ends_the_text(llm: LLM) -> None:
    whole = SamplingParams(seed=3, max_tokens=LENGTH, ignore_eos=True)
    text = llm.generate(PROMPTS[0], whole, use_tqdm=False)[0].outputs[0].text
    stop = text[len(text) // 2 :][:3]
    before = text[: text.index(stop)]
    for include in (False, True):
        params = SamplingParams(
            seed=3,
            max_tokens=LENGTH,
            ignore_eos=True,
            stop=stop,
            include_stop_str_in_output=include,
        )
        choice = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
        assert choice.text == before + stop * include
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_tokens_past_a_stop_string_reach_no_later_call(llm: LLM) -> None:
    """The engine runs on for a few steps after a stop string; no caller may get those tokens."""
    params = SamplingParams(seed=3, max_tokens=LENGTH, ignore_eos=True)
    expected = choices(llm.generate(PROMPTS[0], params, use_tqdm=False))
    stop = expected[0][0].text[3:6]
    for _ in range(5):
        cut = SamplingParams(seed=3, max_tokens=LENGTH, ignore_eos=True, stop=stop)
        llm.generate([PROMPTS[0]] * 3, cut, use_tqdm=False)
        assert choices(llm.generate(PROMPTS[0], params, use_tqdm=False)) == expected


def test_chat_goes_through_the_template(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10)
    conversation = [{"role": "user", "content": "Hello"}]
    output = llm.chat(conversation, params, use_tqdm=False)[0]
    again = llm.generate({"prompt_token_ids": output.prompt_token_ids}, params, use_tqdm=False)
    assert choices([output]) == choices(again)
    assert output.prompt is not None and "Hello" in output.prompt
    assert choices(llm.chat([conversation] * 2, params, use_tqdm=False)) == choices([output] * 2)


def test_refusals_name_the_field_and_leave_the_engine_usable(
    llm: LLM, settings: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    with pytest.raises(ContextLengthExceeded, match="maximum context length") as refusal:
        llm.generate([PROMPTS[0], [5] * 100_000], params, use_tqdm=False)
    assert refusal.value.param == "prompt[1]"
    with pytest.raises(InvalidRequest, match="2 prompts and 1 sampling_params"):
        llm.generate(PROMPTS[:2], [params], use_tqdm=False)
    assert len(llm.generate(PROMPTS, params, use_tqdm=False)) == len(PROMPTS)


def test_more_prompts_than_a_servers_queue_takes(
    solo: LLM, actors: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    for llm in (solo, actors):
        outputs = llm.generate([[5, 6]] * 4200, params, use_tqdm=False)
        assert {tuple(output.outputs[0].token_ids) for output in outputs} == {
            tuple(outputs[0].outputs[0].token_ids)
        }
        assert len(outputs) == 4200


def test_executors_share_pages_on_a_disk(
    cluster: None, settings: dict[str, Any], solo: LLM, tmp_path: Path
) -> None:
    """A new engine reads what another has computed; the tokens are those of an engine alone."""
    prompt = [(7 * i + i * i) % 200 + 5 for i in range(203)]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    (alone,) = solo.generate([prompt], params, use_tqdm=False)
    cached = []
    for executor in ("ray", "inline", "ray"):
        with LLM(executor=executor, **settings, kv_disk_path=str(tmp_path)) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            cached.append(output.num_cached_tokens)
            until = time.monotonic() + 60
            while len(list(tmp_path.rglob("*.page"))) < 14 and time.monotonic() < until:
                time.sleep(0.05)  # a runner writes beside its steps
    assert cached == [0, 192, 192]


def test_idle_engine_holds_no_page(llm: LLM) -> None:
    before = llm.stats()
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    llm.generate(PROMPTS, params, use_tqdm=False)
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.pages_held) == (0, 0, 0)
    assert stats.generation_tokens - before.generation_tokens == LENGTH * len(PROMPTS)
    assert stats.finished["length"] - before.finished.get("length", 0) == len(PROMPTS)
    llm.check_integrity()


def test_progress_bar_can_be_switched_off(solo: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    solo.generate(PROMPTS, params, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    solo.generate(PROMPTS, params)
    assert "Processed prompts: 100%" in capfd.readouterr().err


def test_prompts_outlive_their_engine_in_a_notebook_too(
    cluster: None, settings: dict[str, Any], solo: LLM
) -> None:
    async def cell() -> None:  # a notebook's cells run inside an event loop
        with LLM(executor="ray", **settings) as llm:
            engine: Any = llm._engine
            messages, heard = engine._messages, itertools.count(1)

            def until_it_dies() -> Iterator[Any]:
                for message in messages:
                    yield message
                    if next(heard) == 8:
                        ray.kill(engine._scheduler)

            engine._messages = until_it_dies()
            assert tokens(llm, "choices") == tokens(solo, "choices")
            assert next(heard) > 8
            ray.kill(engine._scheduler)  # and while nothing runs
            assert tokens(llm, "seeded") == tokens(solo, "seeded")

    def tokens(llm: LLM, name: str) -> list[list[list[int]]]:
        outputs = llm.generate(PROMPTS, SETTINGS[name], use_tqdm=False)
        return [[one.token_ids for one in each.outputs] for each in outputs]

    asyncio.run(cell())


@pytest.fixture
def seed_program(
    settings: dict[str, Any], solo: LLM, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], None]:
    """Runs a program written for vLLM with nothing but its import and its model changed."""

    def run(program: str) -> None:
        changed = program.replace("from vllm import", "from rayfin import").replace(
            "Qwen/Qwen2.5-3B-Instruct", settings["model"]
        )
        assert changed.count("rayfin") == 1
        exec(compile(changed, "seed.py", "exec"), {"__name__": "__main__"})

    return run


def test_vllm_program_runs(
    seed_program: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is: penalties, log probabilities of prompt and output, settings for each prompt."""
    seed_program(SEED_PROGRAM)
    lines = capsys.readouterr().out.splitlines()
    prompts = [line.split(", Generated text: ")[0] for line in lines]
    assert prompts == [f"Prompt: {prompt!r}" for prompt in PROMPTS[:3]]
