"""``rayfin run-batch``: a file of requests in, a file of answers out."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import click

from rayfin.actors.config import EngineArgs
from rayfin.actors.timing import BATCH_REPORT_SECONDS, THREAD_SWITCH_SECONDS
from rayfin.deployments.cli.options import build, field_options
from rayfin.deployments.cli.vllm_options import VllmCommand, aliases_of
from rayfin.deployments.serve.server_args import KEY_VARIABLES, ServerArgs

if TYPE_CHECKING:
    import httpx

    from rayfin.deployments.batches.file_job import FileJob, JobCounts
    from rayfin.deployments.batches.line_run import LineRun
    from rayfin.deployments.batches.sender import LineSender

SERVER = (
    *("served_model_name", "chat_template", "chat_template_content_format"),
    *("default_chat_template_kwargs", "generation_config", "override_generation_config"),
    *("tool_call_parser", "reasoning_parser", "enable_auto_tool_choice", "tool_guidance"),
    *("reasoning_field", "trust_request_chat_template", "enable_prompt_tokens_details"),
    *("lora_modules", "lora_dir", "exclude_tools_when_tool_choice_none", "drop_images"),
)
SLOTS = 64  # of a server whose settings are not known
INTERRUPTED = 130


@click.command(cls=VllmCommand)
@click.option(
    *("-i", "--input-file"),
    required=True,
    metavar="FILE",
    help="file with a request in each line, in OpenAI's form; - is standard input",
)
@click.option(
    *("-o", "--output-file"),
    required=True,
    metavar="FILE",
    help="file for the answers, in the order of the input; written under FILE.partial",
)
@click.option(
    "--unordered",
    is_flag=True,
    help="leave the answers in the order in which they came, which saves a pass over the file",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, 65536),
    help="requests in flight; default: twice --max-decoding-batch",
)
@click.option(
    "--url", metavar="URL", help="base URL of a running server's API, instead of an engine here"
)
@click.option("--api-key", envvar=KEY_VARIABLES, show_envvar=True, help="API key of that server")
@click.option(
    "--config",
    metavar="FILE",
    expose_value=False,
    type=click.Path(exists=True, dir_okay=False),
    help="YAML file with flags by name, Rayfin's or vLLM's; the command line wins",
)
@field_options(ServerArgs, SERVER, **aliases_of(ServerArgs))
@field_options(EngineArgs, None, **aliases_of(EngineArgs))
def run_batch(
    input_file: str,
    output_file: str,
    unordered: bool,
    concurrency: int | None,
    url: str | None,
    api_key: str | None,
    **settings: object,
) -> int:
    """Answer the requests of a file, each exactly once.

    Each line is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": ...}.
    A line that is no such request gets an error line. Interrupted (Ctrl-C, kill, a crash), the
    same command goes on where it was.

    \b
    Example:
      rayfin run-batch -i requests.jsonl -o answers.jsonl --model demo
    """
    server, engine = build(ServerArgs), build(EngineArgs)

    from rayfin.deployments.batches.file_job import FileJob

    job = FileJob(input_file, output_file, sys.stdin.buffer, ordered=not unordered)
    try:
        if job.counts.earlier:
            _say(f"{job.counts.earlier} lines are answered already, by an earlier run.")
        if job.counts.total is not None and job.counts.done >= job.counts.total:
            job.finish()
            _say(f"All {job.counts.done} lines are answered in {output_file}.")
            return 0
        client = _server(url, api_key) if url else _local(server, engine)
        count = concurrency or 2 * (engine.max_decoding_batch or SLOTS)
        whole = asyncio.run(_run(job, client, count))
    finally:
        job.close()
    counts = job.counts
    if not whole:
        _say(f"Interrupted: {counts.done} lines are answered in {job.partial}.")
        _say("The same command goes on from there.")
        return INTERRUPTED
    failed = f", {counts.failed} of them with an error" if counts.failed else ""
    _say(f"{counts.done} lines are answered in {output_file}{failed}.")
    return 0


async def _run(job: "FileJob", connection: Any, concurrency: int) -> bool:
    """Returns whether all lines are answered; then the output is complete."""
    from rayfin.deployments.batches.line_run import LineRun
    from rayfin.deployments.batches.sender import LineSender

    async with AsyncExitStack() as stack:
        client, patience = await stack.enter_async_context(connection)
        sender = LineSender(client, patience=patience, say=_say if patience else None)
        run = LineRun(job.lines(), sender.send, job.record, concurrency)
        with _interrupts(run, sender), _progress(job.counts):
            await run.run()
    if not run.stopped:
        job.finish()
    return not run.stopped


@contextmanager
def _interrupts(run: "LineRun", sender: "LineSender") -> Iterator[None]:
    """The first Ctrl-C or SIGTERM lets requests in flight finish; the second drops them."""
    loop, running = asyncio.get_running_loop(), asyncio.current_task()
    assert running is not None

    def interrupt() -> None:
        if run.stopped:
            running.cancel()
            return
        run.stop()
        sender.stop()
        _say("\nStopping: requests in flight finish first (Ctrl-C again: at once).")

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    except asyncio.CancelledError:
        if not run.stopped:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def _local(
    server: ServerArgs, engine: EngineArgs
) -> "AsyncIterator[tuple[httpx.AsyncClient, float | None]]":
    """The routes over an engine of this process."""
    import httpx
    from transformers.utils import logging

    from rayfin.deployments.batches.sender import NO_TIMEOUT
    from rayfin.deployments.offline.async_engines import InlineModel
    from rayfin.deployments.offline.async_llm import AsyncLLM
    from rayfin.deployments.serve.model_args import ModelArgs

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    _say(f"Loading {engine.model} ...")
    async with AsyncLLM(InlineModel(ModelArgs(server, engine))) as llm:
        transport = httpx.ASGITransport(await llm.asgi_app())
        async with httpx.AsyncClient(
            transport=transport, base_url="http://rayfin", timeout=NO_TIMEOUT
        ) as client:
            yield client, 0.0  # an engine here that takes nothing has failed


@asynccontextmanager
async def _server(
    url: str, key: str | None
) -> "AsyncIterator[tuple[httpx.AsyncClient, float | None]]":
    """A running server; it is waited for while it restarts."""
    import httpx

    from rayfin.actors.timing import BATCH_PATIENCE_SECONDS
    from rayfin.deployments.batches.sender import NO_TIMEOUT
    from rayfin.deployments.bench.endpoint import client_settings

    settings = client_settings(url, key) | {"timeout": NO_TIMEOUT}
    settings["base_url"] = settings["base_url"].removesuffix("/v1")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(**settings, limits=limits) as client:
        yield client, BATCH_PATIENCE_SECONDS


@contextmanager
def _progress(counts: "JobCounts") -> Iterator[None]:
    """A bar on a terminal, else a line now and then."""
    began, before = time.monotonic(), counts.done

    def rates() -> tuple[float, float]:
        seconds = max(time.monotonic() - began, 1e-3)
        return (counts.done - before) / seconds, counts.tokens / seconds

    task = asyncio.create_task(_bar(counts, rates) if sys.stderr.isatty() else _log(counts, rates))
    try:
        yield
    finally:
        task.cancel()


async def _log(counts: "JobCounts", rates: Callable[[], tuple[float, float]]) -> None:
    while True:
        await asyncio.sleep(BATCH_REPORT_SECONDS)
        lines, tokens = rates()
        of, left = "", ""
        if counts.total is not None:
            of = f" of {counts.total}"
            if lines:
                left = f", {(counts.total - counts.done) / lines:.0f} s left"
        _say(f"{counts.done}{of} lines, {lines:.1f} lines/s, {tokens:.0f} tokens/s{left}")


async def _bar(counts: "JobCounts", rates: Callable[[], tuple[float, float]]) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        *(BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rates]}")),
        *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(compact=True)),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("lines", total=counts.total, rates="")
        try:
            while True:
                lines, tokens = rates()
                shown = f"{lines:.1f} lines/s {tokens:.0f} tokens/s"
                progress.update(bar, completed=counts.done, rates=shown)
                await asyncio.sleep(0.5)
        finally:
            progress.update(bar, completed=counts.done)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
