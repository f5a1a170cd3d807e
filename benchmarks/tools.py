"""The cost of tools and of reading answers, per request and per token, without an engine.

    python benchmarks/tools.py [--rounds 20]

first, known: reading a request's tools and making their rules, unseen and seen before.
of an API: reading known tools from its body to the rules and to what a chat template reads.
plain, parsed: a token of an answer to text, without and with a parser, tokens one by one.
arguments: a call with 100 kB of arguments.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from rayfin.actors.config import EngineArgs
from rayfin.actors.messages import EngineRequest, Sampling, StopRules, TokenDelta
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.api.anthropic.bodies import MessagesRequest
from rayfin.deployments.api.anthropic.tools import answer_rules as message_rules
from rayfin.deployments.api.openai.bodies import ChatCompletionRequest
from rayfin.deployments.api.responses.bodies import ResponseRequest
from rayfin.deployments.api.responses.tools import answer_rules as response_rules
from rayfin.deployments.api.responses.tools import repeated_tools
from rayfin.deployments.generation.plan import AnswerRules, OutputPlan, make_plan
from rayfin.deployments.guidance.tool_choice import declared_tools, read_tool_choice
from rayfin.deployments.serve.preflight import tokenizer_path
from rayfin.deployments.text.messages import PlainTools, plain_tools
from rayfin.deployments.text.output import OutputText
from rayfin.deployments.text.parsing.detect import detect
from rayfin.deployments.text.tokenizer import Tokenizer

TEXT = "It is sunny in Paris, 18 degrees. " * 60


def tools(count: int, salt: str = "") -> list[dict[str, Any]]:
    """Strict functions of half a kilobyte each."""
    properties = {name: {"type": "string", "description": "x" * 60} for name in ("city", "unit")}
    schema = {"type": "object", "properties": properties, "required": ["city", "unit"]}
    function = {"parameters": schema, "strict": True, "description": f"{salt}{'y' * 120}"}
    return [
        {"type": "function", "function": {"name": f"get_{i}", **function}} for i in range(count)
    ]


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of Responses."""
    return {"type": "function", **tool["function"]}


def as_message(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of Messages."""
    inner = dict(tool["function"])
    return {"input_schema": inner.pop("parameters"), **inner}


def of_a_chat(body: ChatCompletionRequest) -> tuple[AnswerRules, PlainTools | None]:
    return body.answer_rules(), body.declared_tools.shown


def of_a_response(body: ResponseRequest) -> tuple[AnswerRules, PlainTools | None]:
    repeated_tools(body)
    return response_rules(body), body.declared_tools.shown


def of_a_message(body: MessagesRequest) -> tuple[AnswerRules, PlainTools | None]:
    return message_rules(body), body.declared_tools.shown


def best(rounds: int, work: Callable[[int], object]) -> float:
    """The processor seconds of the fastest round."""
    times = []
    for number in range(rounds):
        started = time.process_time()
        work(number)
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    tokenizer = Tokenizer.load(tokenizer_path(EngineArgs.from_dict({"model": "demo"})))
    formats = detect(tokenizer)

    def plan(declared: list[dict[str, Any]]) -> OutputPlan:
        functions = declared_tools(declared).functions
        rules = AnswerRules(functions, read_tool_choice("auto", functions))
        return make_plan(formats, tokenizer, rules)

    def read(ids: list[int], made: OutputPlan | None) -> None:
        request = EngineRequest("r", np.array([5], np.int32), Sampling(), StopRules(10**6))
        output = OutputText(tokenizer, SamplingParams(), request, made and made.parser())
        for token in ids:
            output.push(TokenDelta("r", [token]))

    for count in (1, 8, 128):
        first = best(rounds, lambda i, n=count: plan(tools(n, f"{i} ")))
        declared = tools(count)
        known = best(rounds, lambda _, listed=declared: plan(listed))
        size = len(json.dumps(declared)) / 1000
        print(
            f"{count} tools, {size:.0f} kB: first {1e3 * first:.2f} ms, known {1e3 * known:.2f} ms"
        )
    control = tokenizer.control_tokens
    forms = (
        ("chat", ChatCompletionRequest, lambda tool: tool, of_a_chat),
        ("Responses", ResponseRequest, flat, of_a_response),
        ("Messages", MessagesRequest, as_message, of_a_message),
    )
    for name, kind, form, read_body in forms:
        written = [form(tool) for tool in tools(128)]

        def known_body(
            _: int, kind: Any = kind, written: Any = written, read: Any = read_body
        ) -> None:
            rules, shown = read(kind(tools=written))
            plain_tools(shown).find(control)
            make_plan(formats, tokenizer, rules)

        with_tools = best(rounds, known_body)
        print(f"128 known tools of a body of {name}: {1e3 * with_tools:.2f} ms")
    made, ids = plan(tools(1)), tokenizer.encode(TEXT, False)
    plain = best(rounds, lambda _: read(ids, None)) / len(ids)
    parsed = best(rounds, lambda _: read(ids, made)) / len(ids)
    print(f"a token of text: plain {1e6 * plain:.1f} us, parsed {1e6 * parsed:.1f} us")
    arguments = json.dumps({"city": "x y " * 25_000, "unit": "c"})
    call = f'<tool_call>\n{{"name": "get_0", "arguments": {arguments}}}\n</tool_call>'
    ids = tokenizer.encode(call, False)
    alone = best(3, lambda _: read(ids, None)) / len(ids)
    whole = best(3, lambda _: read(ids, made)) / len(ids)
    print(
        f"a token of 100 kB of arguments: plain {1e6 * alone:.1f} us, parsed {1e6 * whole:.1f} us"
    )


if __name__ == "__main__":
    main()
