"""``rayfin generate``: offline completion."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rayfin.actors.config import EngineArgs
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.cli.options import (
    SectionedCommand,
    build,
    field_options,
    sampling_options,
    values_of,
)

if TYPE_CHECKING:
    from rayfin.deployments.offline.outputs import RequestOutput

SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "min_p", "seed", "stop", "n")


@click.command(cls=SectionedCommand)
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option(
    "--chat", is_flag=True, help="send each prompt as a user message through the chat template"
)
@click.option("--json", "as_json", is_flag=True, help="print one line of JSON per output")
@click.option(
    "--executor",
    type=click.Choice(["inline", "ray"]),
    default="inline",
    show_default=True,
    help="run the engine in this process (inline) or as Ray actors (ray)",
)
@sampling_options(SAMPLING)
@field_options(EngineArgs, seed={"flag": "dummy-seed"})
def generate(
    prompts: tuple[str, ...], chat: bool, as_json: bool, executor: str, **settings: object
) -> None:
    """Complete prompts without a server, in one batch.

    Reads one prompt per line from standard input if no PROMPT is given.

    \b
    Example:
      rayfin generate --model demo --chat --temperature 0 "What is 37 + 48?"
    """
    params = build(SamplingParams)
    build(EngineArgs)  # reports invalid flags before anything is loaded
    texts = list(prompts) or _lines_of_stdin()

    from transformers.utils import logging

    from rayfin.deployments.offline.llm import LLM

    terminal = sys.stderr.isatty()
    if not terminal:
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with LLM(executor=executor, **values_of(EngineArgs)) as llm:
        progress = terminal and len(texts) > 1
        if chat:
            messages = [[{"role": "user", "content": text}] for text in texts]
            results = llm.chat(messages, params, use_tqdm=progress)
        else:
            results = llm.generate(texts, params, use_tqdm=progress)
    _print_json(texts, results) if as_json else _print_texts(texts, results)


def _lines_of_stdin() -> list[str]:
    if sys.stdin.isatty():
        raise click.UsageError("no PROMPT, and standard input is a terminal")
    if lines := [text for line in sys.stdin if (text := line.rstrip("\r\n"))]:
        return lines
    raise click.UsageError("no PROMPT, and no line on standard input")


def _print_texts(texts: Sequence[str], results: "Sequence[RequestOutput]") -> None:
    """Prints a single output alone, and several under their prompts."""
    if len(results) == 1 and len(results[0].outputs) == 1:
        print(results[0].outputs[0].text)
        return
    for text, result in zip(texts, results, strict=True):
        for output in result.outputs:
            number = f" [{output.index}]" if len(result.outputs) > 1 else ""
            print(f">{number} {text}\n{output.text}\n")


def _print_json(texts: Sequence[str], results: "Sequence[RequestOutput]") -> None:
    for text, result in zip(texts, results, strict=True):
        for output in result.outputs:
            line: dict[str, Any] = {
                "prompt": text,
                "index": output.index,
                "text": output.text,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
                "prompt_tokens": len(result.prompt_token_ids),
                "completion_tokens": len(output.token_ids),
            }
            print(json.dumps(line, ensure_ascii=False))
