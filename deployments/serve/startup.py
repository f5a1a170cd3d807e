"""What a start says: one line for each stage, and at the end where the server is.

A terminal shows the stage that runs, with its seconds. Another output gets the same lines plain.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray

from rayfin import __version__
from rayfin.actors.config import EngineArgs
from rayfin.actors.media.part import MediaFacts
from rayfin.actors.messages import EngineInfo
from rayfin.actors.model_files.files import read_object
from rayfin.actors.model_files.pooling_folder import read_recipe
from rayfin.actors.timing import START_SHOWN_SECONDS, START_TOLD_SECONDS
from rayfin.deployments.client.engine_names import find_engine
from rayfin.deployments.edge.listen_options import ListenOptions
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.preflight import (
    located,
    on_hub,
    place,
    read_template,
    tokenizer_path,
)
from rayfin.deployments.text.parsing.formats import NONE

SHOWN = 12  # columns of a name in the summary
NO_PLACE = "written into the system message: the chat template has no place for them"


class StartUp:
    """Prints the stages of a start to standard output."""

    def __init__(self) -> None:
        self._console: Any = None
        if sys.stdout.isatty():
            from rich.console import Console

            self._console = Console(highlight=False)

    @contextmanager
    def stage(
        self, doing: str, details: Callable[[], str] = str, *, announced: bool = False
    ) -> Iterator[Callable[[str], None]]:
        """A stage of the start. The caller passes what was done to the function that it gets.

        Args:
            doing: what is done, without a full stop.
            details: what is known of it now; a terminal shows it while the stage runs.
            announced: a plain output has a line at the beginning, too; for a stage that takes long.
        """
        began = time.monotonic()
        done: list[str] = []
        if self._console is None:
            if announced:
                print(f"{doing} ...", flush=True)
            yield done.append
        else:
            with self._console.status(doing, spinner="dots") as status:
                over = threading.Event()
                shown = (over, status, doing, details, began)
                watch = threading.Thread(target=_refresh, args=shown, daemon=True)
                watch.start()
                try:
                    yield done.append
                finally:
                    over.set()
                    watch.join()
        for text in done:
            self._line(text, time.monotonic() - began)

    def _line(self, text: str, seconds: float) -> None:
        if self._console is None:
            print(f"{text} ({seconds:.1f} s).", flush=True)
        else:
            self._console.print(f"[green]✓[/] {_escaped(text)} [dim]{seconds:.1f} s[/]")

    def summary(self, rows: Sequence[tuple[str, str]], example: str) -> None:
        """Prints where the server is, by name and value, and a command to try."""
        if self._console is None:
            lines = [f"  {name:{SHOWN}}{value}" for name, value in rows[1:]]
            print("\n".join(["", " ".join(rows[0]), "", *lines, "", example]), flush=True)
            return
        title, what = rows[0]
        self._console.print(f"\n[bold]{_escaped(title)}[/] {_escaped(what)}\n", soft_wrap=True)
        for name, value in rows[1:]:
            text = f"  [dim]{name:{SHOWN}}[/]{_escaped(value)}"
            self._console.print(text, soft_wrap=True)
        self._console.print(f"\n[dim]{_escaped(example)}[/]", soft_wrap=True)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _refresh(
    over: threading.Event, status: Any, doing: str, details: Callable[[], str], began: float
) -> None:
    while not over.wait(START_SHOWN_SECONDS):
        known = ""
        with suppress(Exception):  # of a cluster that is about to stop
            known = details()
        seconds = time.monotonic() - began
        status.update(
            f"{_escaped(' · '.join(filter(None, [doing, known])))} [dim]{seconds:.0f} s[/]"
        )


def sought(models: Sequence[ModelArgs]) -> str:
    """The models that are no folders, and where they are looked for; empty if there are none."""
    names = [model.engine.model for model in models if on_hub(model.engine.model)]
    if not names:
        return ""
    from huggingface_hub import constants

    return f"{', '.join(names)} at {place(constants.ENDPOINT)}"


def loading(models: Sequence[ModelArgs]) -> str:
    """What is loaded, and how large its weights are where that is known."""
    return ", ".join(f"{model.engine.model}{_size(model)}" for model in models)


def _size(model: ModelArgs) -> str:
    if model.engine.load_format == "dummy":
        return " (random weights)"
    folder = Path(located(model.engine).model)
    files = folder.glob("*.safetensors") if folder.is_dir() else ()
    total = sum(path.stat().st_size for path in files)
    return f" ({readable(total)} of weights)" if total else ""


def readable(size: float) -> str:
    """A number of bytes in the unit that shows one to three digits before the point."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def progress(name: str) -> str:
    """Which deployments of an application are ready."""
    # Here, for it takes a second to import, and is there by then.
    from ray import serve as ray_serve

    application = ray_serve.status().applications.get(name)
    parts = application.deployments if application is not None else {}
    ready = [part for part, deployment in parts.items() if deployment.status.value == "HEALTHY"]
    return f"{len(ready)} of {len(parts)} parts ready" if parts else ""


def engine_info(app: str, model: ModelArgs) -> EngineInfo | None:
    """The limits of one of a model's engines, None if it has none or does not say."""
    engine = find_engine(app, model.deployment)
    if engine is None:
        return None
    try:
        info: EngineInfo = ray.get(engine.info.remote(), timeout=START_TOLD_SECONDS)
    except Exception:  # it has just been replaced; the summary does without
        return None
    return info


def summary(
    models: Sequence[ModelArgs],
    host: str,
    port: int,
    listen_options: ListenOptions,
    infos: Sequence[EngineInfo | None],
) -> tuple[list[tuple[str, str]], str]:
    """The rows of the summary, the title first, and a command that asks the first model."""
    address, more = listen_options.address(host, port)
    served = ", ".join(model.names[0] for model in models)
    server = models[0].server
    rows = [(f"Rayfin serves {served} at {address}/v1", "(Ctrl-C stops it)")]
    if listen_options.uds is not None:
        rows.append(("socket", listen_options.uds))
    for model, info in zip(models, infos, strict=True):
        if info is not None:
            rows.append((model.names[0] if len(models) > 1 else "context", _context(model, info)))
            rows += [("memory", memory)] if (memory := _memory(info)) else []
            rows += [("tools", NO_PLACE)] if _writes_tools(model) else []
    if server.ui:
        rows.append(("page", f"{address}/ui"))
    rows.append(("docs", f"{address}/docs"))
    if server.admin_port is not None:
        rows.append(
            ("operators", f"rayfin status --url http://{server.admin_host}:{server.admin_port}")
        )
    rows.append(("version", __version__))
    key = ' -H "Authorization: Bearer $KEY"' if server.api_keys() else ""
    return rows, _example(models[0], infos[0], f"{more}{address}/v1", key)


def _writes_tools(model: ModelArgs) -> bool:
    """Whether the model has a chat template that does not name tools, so that none can be in it.

    An ingress tells more by rendering it, and says so in its log.
    """
    server, args = model.server, model.engine
    if server.tool_call_parser == NONE or read_recipe(located(args)) is not None:
        return False
    template = read_template(server.chat_template)
    if template is None and (path := _local(args, "chat_template.jinja")) is not None:
        template = path.read_text(encoding="utf-8")
    if template is None and (path := _local(args, "tokenizer_config.json")) is not None:
        named = read_object(str(path.parent), path.name).get("chat_template")
        template = str(named) if named else None  # of several names, a list
    return bool(template) and "tools" not in str(template)


def _local(args: EngineArgs, name: str) -> Path | None:
    """A file of the tokenizer on this machine: no Hub is asked."""
    folder = tokenizer_path(args)
    if not on_hub(folder):
        path = Path(folder) / name
        return path if path.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    revision = args.tokenizer_hub["revision"]
    file = try_to_load_from_cache(folder, name, cache_dir=args.download_dir, revision=revision)
    return Path(file) if isinstance(file, str) else None


def _context(model: ModelArgs, info: EngineInfo) -> str:
    """Returns how long requests may be."""
    recipe = read_recipe(located(model.engine))
    if recipe is not None:
        size = recipe.cut or recipe.dimensions
        vectors = f"vectors of {size} numbers" if size else "vectors"
        answers = vectors if recipe.kind == "embed" else "scores" if recipe.scores else "classes"
        return f"{info.max_model_len:,} tokens a text; it answers with {answers}"
    return (
        f"{info.max_model_len:,} tokens a request; {info.num_pages * info.page_size:,} in the KV "
        f"cache, {info.num_pages:,} pages of {info.page_size}"
    )


def _memory(info: EngineInfo) -> str:
    """Returns what an engine takes at most; empty where nothing is known."""
    cache = info.num_pages * info.page_bytes
    pages = f"{readable(cache)} of KV cache, taken page by page" if cache else ""
    if not info.memory_bytes:
        return pages
    rest = f"{readable(max(info.memory_bytes - cache, 0))} of weights and activations"
    whole = f"up to {readable(info.memory_bytes)} an engine (--memory-utilization)"
    return f"{whole}: {', '.join(filter(None, [rest, pages]))}"


def _example(model: ModelArgs, info: EngineInfo | None, url: str, key: str) -> str:
    """A command that asks a model."""
    name, recipe = model.names[0], read_recipe(located(model.engine))
    if recipe is not None:
        body = '"input": "What is a zebra?"'
        if recipe.scores:
            body = '"query": "What is a zebra?", "documents": ["An animal.", "A street."]'
        route = (
            "rerank" if recipe.scores else "embeddings" if recipe.kind == "embed" else "classify"
        )
        url = url.removesuffix("/v1") if route == "classify" else url
        return f"""  curl {url}/{route}{key} -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", {body}}}'
"""
    media = None if info is None else info.part(MediaFacts)
    if media is not None and media.front_tokens:  # it writes down speech
        return f"""  curl {url}/audio/transcriptions{key} -F model={name} -F file=@speech.mp3
"""
    return f"""  curl {url}/chat/completions{key} -H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "temperature": 0,
         "messages": [{{"role": "user", "content": "What is 37 + 48?"}}]}}'
"""
