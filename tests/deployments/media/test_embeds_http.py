"""``prompt_embeds`` through /v1/completions and ``LLM``: the tokens are those of transformers."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.torch
import torch

from embeds_oracle import (
    BODY,
    OUTPUT,
    SETTINGS,
    Oracle,
    client_of,
    in_base64,
    safe_file,
    torch_file,
)
from rayfin import LLM, BeamSearchParams, SamplingParams
from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.media.read_embeds import EmbedsReader

pytestmark = pytest.mark.anyio

TEXT = "/v1/completions"
DRAWN = {"temperature": 1.0, "top_k": 1}  # the likeliest token, drawn


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", enable_prompt_embeds=True, max_model_len=64, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
async def client(llm: LLM) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(llm, EmbedsReader()) as client:
        yield client


async def tokens(client: httpx.AsyncClient, **fields: Any) -> list[list[int]]:
    reply = await client.post(TEXT, json={**BODY, "return_token_ids": True, **fields})
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


@pytest.mark.parametrize("write", [torch_file, safe_file])
async def test_tokens_are_transformers_own(
    write: Any, client: httpx.AsyncClient, oracle: Oracle
) -> None:
    rows = oracle.rows(11)
    body = {**BODY, "prompt_embeds": write(rows), "return_token_ids": True}
    answer = (await client.post(TEXT, json=body)).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == oracle.answer(rows)
    assert choice["prompt_token_ids"] is None
    assert answer["usage"]["prompt_tokens"] == 11
    assert answer["usage"]["completion_tokens"] == OUTPUT


async def test_types_and_shapes(client: httpx.AsyncClient, oracle: Oracle) -> None:
    rows = oracle.rows(9, 1)
    for form in (torch.float64, torch.bfloat16, torch.float16):
        for write in (torch_file, safe_file):
            expected = oracle.answer(rows.to(form).float())
            assert await tokens(client, prompt_embeds=write(rows.to(form))) == [expected]
    expected = oracle.answer(rows)
    assert await tokens(client, prompt_embeds=torch_file(rows.unsqueeze(0))) == [expected]
    lines = "\n".join(safe_file(rows).replace("+", "-").replace("/", "_").rstrip("="))
    assert await tokens(client, prompt_embeds=lines) == [expected]
    transposed = rows.T.contiguous().T
    assert await tokens(client, prompt_embeds=torch_file(transposed)) == [expected]


async def test_lists_and_prompts_beside_them(client: httpx.AsyncClient, oracle: Oracle) -> None:
    """Embeddings come first, as in vLLM; ``n`` counts for both."""
    rows = [oracle.rows(7, 2), oracle.rows(30, 3)]
    written = [torch_file(rows[0]), safe_file(rows[1])]
    expected = [oracle.answer(own) for own in rows]
    plain = await tokens(client, prompt="The zebra")
    assert await tokens(client, prompt_embeds=written) == expected
    assert await tokens(client, prompt_embeds=written, prompt="The zebra") == expected + plain
    both = await tokens(client, prompt_embeds=written[0], prompt=["The zebra", "The zebra"])
    assert both == [expected[0], *plain, *plain]
    twice = await tokens(client, prompt_embeds=written, prompt="", n=2, **DRAWN)
    assert twice == [expected[0], expected[0], expected[1], expected[1]]


async def test_streams(client: httpx.AsyncClient, oracle: Oracle) -> None:
    rows = oracle.rows(12, 4)
    body = {**BODY, "prompt_embeds": torch_file(rows), "stream": True, "return_token_ids": True}
    reply = await client.post(TEXT, json={**body, "stream_options": {"include_usage": True}})
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    found = [t for chunk in chunks for c in chunk["choices"] for t in c.get("token_ids") or ()]
    assert found == oracle.answer(rows)
    assert chunks[-1]["usage"]["prompt_tokens"] == 12


async def test_truncated(client: httpx.AsyncClient, oracle: Oracle) -> None:
    rows = oracle.rows(20, 5)
    data = torch_file(rows)
    left = await tokens(client, prompt_embeds=data, truncate_prompt_tokens=8)
    right = await tokens(
        client, prompt_embeds=data, truncate_prompt_tokens=8, truncation_side="right"
    )
    assert left == [oracle.answer(rows[-8:])] and right == [oracle.answer(rows[:8])]


async def test_pages_are_shared(client: httpx.AsyncClient, oracle: Oracle) -> None:
    rows = oracle.rows(40, 6)
    cached = []
    for form in (rows, rows, torch.cat([rows[:32], rows[:8]])):
        reply = await client.post(TEXT, json={**BODY, "prompt_embeds": torch_file(form)})
        details = reply.json()["usage"]["prompt_tokens_details"]
        cached.append(details["cached_tokens"] if details else 0)
    assert cached == [0, 32, 32]


async def test_a_search(client: httpx.AsyncClient, oracle: Oracle) -> None:
    rows = oracle.rows(9, 8)
    body = {**BODY, "prompt_embeds": torch_file(rows), "use_beam_search": True, "n": 2}
    reply = await client.post(TEXT, json=body)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"]) == 2


def _bad(oracle: Oracle) -> dict[str, tuple[Any, str]]:
    rows = oracle.rows(4)
    nan, endless = rows.clone(), rows.double()
    nan[2, 3], endless[1, 1] = float("nan"), 1e300
    two = in_base64(safetensors.torch.save({"a": rows, "b": rows.clone()}))
    long = torch.zeros(1, oracle.hidden).expand(10**6, oracle.hidden)
    return {
        "no base64": ("not base64!", "base64"),
        "no file": (in_base64(b"hello"), "base64"),
        "empty": ("", "base64"),
        "a number": (5, "base64"),
        "another hidden size": (torch_file(rows[:, :-1]), "hidden size"),
        "one dimension": (torch_file(rows[0]), "shape"),
        "a batch": (torch_file(torch.stack([rows, rows])), "shape"),
        "sparse": (torch_file(rows.to_sparse()), "dense tensor"),
        "integers": (torch_file(rows.long()), "integer tensors"),
        "integers, safe": (safe_file(rows.long()), "I64"),
        "two tensors": (two, "2 tensors"),
        "NaN": (torch_file(nan), "finite"),
        "NaN, 16 bits": (safe_file(nan.bfloat16()), "finite"),
        "over 32 bits": (torch_file(endless), "finite"),
        "too long": (torch_file(oracle.rows(65)), "maximum context length"),
        "as long as the context": (torch_file(oracle.rows(64)), "maximum context length"),
        "a row many times": (torch_file(rows[:1].expand(9, -1)), "repeats"),
        "rows that overlap": (torch_file(rows.as_strided((4, oracle.hidden), (1, 1))), "repeats"),
        "far too long, in few bytes": (torch_file(long), "maximum context length"),
        "far too large": ("A" * (64 * oracle.hidden * 8 * 4 // 3 + 2**18), "characters"),
        "a dictionary": (torch_file({"prompt_embeds": rows}), "dense tensor"),
    }


async def test_what_is_refused(client: httpx.AsyncClient, oracle: Oracle) -> None:
    for name, (value, words) in _bad(oracle).items():
        reply = await client.post(TEXT, json={**BODY, "prompt_embeds": value})
        error = reply.json().get("error", {})
        assert reply.status_code == 400 and error["param"] == "prompt_embeds", (name, reply.text)
        assert words in error["message"], (name, error)
        listed = [torch_file(oracle.rows(2)), value]
        reply = await client.post(TEXT, json={**BODY, "prompt_embeds": listed})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == "prompt_embeds[1]", (name, error)
        assert words in error["message"], (name, error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_embeds": ["x"] * 2000}, "prompt_embeds"),
    ],
)
async def test_fields_that_do_not_go_with_them(
    fields: dict[str, Any], param: str, client: httpx.AsyncClient, oracle: Oracle
) -> None:
    body = {**BODY, "prompt_embeds": torch_file(oracle.rows(4)), **fields}
    reply = await client.post(TEXT, json=body)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


async def test_without_the_flag(llm: LLM, oracle: Oracle) -> None:
    async with client_of(llm, None) as client:
        reply = await client.post(TEXT, json={**BODY, "prompt_embeds": torch_file(oracle.rows(4))})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "prompt_embeds"
    assert "--enable-prompt-embeds" in error["message"]
    with LLM("demo", **SETTINGS) as plain:
        with pytest.raises(InvalidRequest, match="enable-prompt-embeds"):
            plain.generate({"prompt_embeds": oracle.rows(4)}, use_tqdm=False)


GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)


def test_llm(llm: LLM, oracle: Oracle) -> None:
    """Tensors of any kind, arrays, and texts beside them."""
    rows = oracle.rows(11, 9)
    prompts: list[Any] = [
        {"prompt_embeds": rows},
        {"prompt_embeds": rows.numpy(), "prompt": "only shown", "cache_salt": "a"},
        "The zebra",
        {"prompt_embeds": rows.bfloat16().unsqueeze(0)},
        {"prompt_embeds": torch.nn.Parameter(rows[:5])},
    ]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    expected = [oracle.answer(rows), oracle.answer(rows), oracle.answer(rows.bfloat16().float())]
    found = [output.outputs[0].token_ids for output in outputs]
    assert [found[0], found[1], found[3]] == expected and found[4] == oracle.answer(rows[:5])
    assert found[2] == llm.generate("The zebra", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert len(outputs[0].prompt_token_ids) == 11
    names = llm.enqueue({"prompt_embeds": rows}, GREEDY)
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.request_id == names[0] and output.outputs[0].token_ids == expected[0]


@pytest.mark.parametrize(
    "value",
    [
        [[1.0, 2.0]],
        "AAAA",
        torch.zeros(3, 4),
        torch.zeros(3, dtype=torch.float32),
        torch.zeros(3, 64).long(),
        torch.zeros(3, 64).to_sparse(),
        np.zeros((3, 4), np.int32),
        torch.full((3, 64), float("inf")),
    ],
)
def test_llm_refuses(llm: LLM, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["x", {"prompt_embeds": value}], GREEDY, use_tqdm=False)
    assert caught.value.param == "prompt[1].prompt_embeds"


def test_llm_methods_that_take_none(llm: LLM, oracle: Oracle) -> None:
    with pytest.raises(InvalidRequest):
        llm.beam_search({"prompt_embeds": oracle.rows(3)}, BeamSearchParams(2, max_tokens=2))


def test_reading_needs_no_torch(oracle: Oracle, tmp_path: Path) -> None:
    """An ingress has none, and must not get it by reading."""
    (tmp_path / "embeds").write_text(torch_file(oracle.rows(3)))
    script = (
        "import sys\n"
        "from rayfin.actors.messages import EngineInfo\n"
        "from rayfin.deployments.media.read_embeds import EmbedsReader\n"
        "from rayfin.actors.media.part import EmbedsFacts\n"
        f"info = EngineInfo('e', 64, 100, 10, 4, parts=(EmbedsFacts(size={oracle.hidden}),))\n"
        f"data = open({str(tmp_path / 'embeds')!r}).read()\n"
        "assert len(EmbedsReader().read_now(data, 'prompt_embeds', info).ids) == 3\n"
        "assert 'torch' not in sys.modules and 'pickle' not in EmbedsReader.__module__\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
