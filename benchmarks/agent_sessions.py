"""What a session of a coding agent costs: its second turn, a tool that it finds, its patches.

    python benchmarks/agent_sessions.py [--patches 1000]

The model is a small one with random weights, in this process, behind the routes.

turns: a prompt as Codex sends it (instructions, tools, a question), then its call and a result. How
much of the second prompt is cached, and its first event beside the first turn's.
search: the same with many tools that wait, one of which a search finds. Tokens that are computed.
patches: calls of ``apply_patch`` at temperature 1 under Codex's own grammar, each to its end. Bytes
that end lines and patches are likelier, as the weights know no patch.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from patches import TOOL as PATCHER  # noqa: E402
from patches import parse_patch  # noqa: E402

CONTEXT = 32_768
VOCABULARY = 4096
TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif -%}
{%- for m in messages %}{{ '<|turn|>' + m.role + '\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}
{{- '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"""
SEARCH = {
    "type": "tool_search",
    "execution": "client",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
}
AT_ONCE = 32
LIKELIER = 7.0  # added to the logits of bytes that end lines


def make_model(folder: Path) -> None:
    """Saves a small model, and a tokenizer of this repository's words."""
    import tokenizers
    import torch
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    whole = tokenizers.Tokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    whole.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def tools(count: int, **more: Any) -> list[dict[str, Any]]:
    """Functions with schemas as long as agents' are."""
    words = (ROOT / "docs" / "tools.md").read_text()
    return [
        {
            "type": "function",
            "name": f"tool_{i}",
            "description": words[400 * i % 4000 :][:800],
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
            **more,
        }
        for i in range(count)
    ]


async def ask(client: httpx.AsyncClient, **body: Any) -> tuple[float, dict[str, Any]]:
    """Streams a response; returns the seconds to its first text or item, and the response."""
    started, first = time.perf_counter(), 0.0
    asked = {"model": "m", "stream": True, "store": False, "max_output_tokens": 8, **body}
    async with client.stream("POST", "/v1/responses", json=asked) as reply:
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if not first and event["type"] == "response.output_item.added":
                    first = time.perf_counter() - started
    return first, event["response"]


async def turns(client: httpx.AsyncClient) -> None:
    instructions = (ROOT / "docs" / "api.md").read_text()[:40_000]
    fields: dict[str, Any] = {"instructions": instructions, "tools": [*tools(12), PATCHER]}
    items: list[Any] = [{"role": "user", "content": "Fix calc.py"}]
    first, _ = await ask(client, **fields, input=items)
    items += [
        {"type": "function_call", "call_id": "c", "name": "tool_1", "arguments": '{"path": "a"}'},
        {"type": "function_call_output", "call_id": "c", "output": "def add(a, b): return a - b"},
    ]
    second, answer = await ask(client, **fields, input=items)
    usage = answer["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    print(
        f"turns: {usage['input_tokens']} tokens, {cached / usage['input_tokens']:.3f} of them "
        f"cached; first item {first:.2f} s, then {second:.2f} s ({second / first:.2f})"
    )


async def search(client: httpx.AsyncClient) -> None:
    waiting = tools(60, defer_loading=True)
    fields: dict[str, Any] = {"tools": [SEARCH, *waiting], "instructions": "You find tools."}
    items: list[Any] = [{"role": "user", "content": "Find a tool"}]
    await ask(client, **fields, input=items)
    call = {"type": "tool_search_call", "call_id": "s", "arguments": {"query": "files"}}
    items += [call, {"type": "tool_search_output", "call_id": "s", "tools": waiting[7:8]}]
    _, answer = await ask(client, **fields, input=items)
    usage = answer["usage"]
    computed = usage["input_tokens"] - usage["input_tokens_details"]["cached_tokens"]
    _, whole = await ask(client, tools=tools(60), input="hello")
    print(
        f"search: {computed} tokens computed for a tool that was found; "
        f"{whole['usage']['input_tokens']} with all tools in the prompt"
    )


def parses(text: str) -> bool:
    try:
        return bool(parse_patch(text))
    except ValueError:
        return False


async def patches(client: httpx.AsyncClient, count: int, biases: dict[str, float]) -> None:
    waiting = asyncio.Semaphore(AT_ONCE)
    fields: dict[str, Any] = {
        "model": "m",
        "tools": [PATCHER],
        "tool_choice": {"type": "custom", "name": "apply_patch"},
        "temperature": 1,
        "max_output_tokens": 16_000,
        "logit_bias": biases,
    }

    async def one(seed: int) -> tuple[bool, int]:
        async with waiting:
            body = {**fields, "input": f"Fix file {seed}", "seed": seed}
            answer = (await client.post("/v1/responses", json=body)).json()
        whole = answer["status"] == "completed"
        return whole and parses(answer["output"][-1]["input"]), answer["usage"]["output_tokens"]

    started = time.perf_counter()
    answers = await asyncio.gather(*map(one, range(count)))
    tokens = sum(tokens for _, tokens in answers)
    seconds = time.perf_counter() - started
    print(
        f"patches: {sum(ok for ok, _ in answers)} of {count} parse; {tokens / seconds:.0f} tokens/s"
    )


async def run(folder: Path, count: int) -> None:
    from rayfin.actors.config import EngineArgs
    from rayfin.deployments.offline.async_engines import InlineModel
    from rayfin.deployments.offline.async_llm import AsyncLLM
    from rayfin.deployments.serve.model_args import ModelArgs
    from rayfin.deployments.serve.server_args import ServerArgs
    from rayfin.deployments.text.tokenizer import Tokenizer

    engine = EngineArgs(model=str(folder), threads=1, kv_cache_memory=512 * 1024**2)
    server = ServerArgs(served_model_name=["m"], tool_call_parser="hermes")
    encode = Tokenizer.load(str(folder)).encode
    biases = {str(encode(text, False)[0]): LIKELIER for text in ("\\", "n", "*", '"')}
    async with AsyncLLM(InlineModel(ModelArgs(server, engine))) as llm:
        transport = httpx.ASGITransport(await llm.asgi_app())
        async with httpx.AsyncClient(
            transport=transport, base_url="http://rayfin", timeout=None
        ) as client:
            await ask(client, input="warm")
            await turns(client)
            await search(client)
            await patches(client, count, biases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--patches", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        asyncio.run(run(Path(folder), options.patches))


if __name__ == "__main__":
    main()
