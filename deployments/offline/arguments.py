"""Arguments of ``LLM``'s methods, in vLLM's forms."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.generation.limits import PRIORITIES
from rayfin.deployments.generation.prompt_forms import IDS, TEXT
from rayfin.deployments.offline.media import plain
from rayfin.deployments.vllm.lacks import refuse

UseTqdm = bool | Callable[..., Any]
"""Whether a call shows its progress, or what makes its bar."""

SHOWN_EACH = 0.5  # seconds

SPECIAL = "add_special_tokens"


def progress(use_tqdm: UseTqdm, total: int, what: str) -> "tqdm[Any]":
    """Makes a bar of ``total`` steps; hidden if ``use_tqdm`` is False."""
    if callable(use_tqdm):
        bar: tqdm[Any] = use_tqdm(total=total, desc=what, dynamic_ncols=True)
        return bar
    return tqdm(total=total, desc=what, disable=not use_tqdm, dynamic_ncols=True)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Counts the seconds of a start on a terminal, from its first one on."""
    if not sys.stderr.isatty():
        yield
        return
    began, done = time.monotonic(), threading.Event()

    def show() -> None:
        while True:
            line = f"Loading {model}: {time.monotonic() - began:.1f} s"
            print(f"\r{line}", end="", file=sys.stderr, flush=True)
            if done.wait(SHOWN_EACH):
                return print(f"\r{' ' * len(line)}\r", end="", file=sys.stderr, flush=True)

    shown = threading.Thread(target=show, daemon=True)
    shown.start()
    try:
        yield
    finally:
        done.set()
        shown.join()


def beside_ids(prompts: Any, ids: Any) -> Any:
    """Joins prompts with token ids of an argument of their own, as earlier versions of vLLM do.

    Raises:
        InvalidRequest: there is neither, or they are not as many.
    """
    if ids is None:
        if prompts is None:
            raise InvalidRequest("prompts is missing", "prompts")
        return prompts
    listed = plain(ids)
    if not listed or isinstance(listed[0], int):
        listed = [listed]
    if prompts is None:
        return [{IDS: prompt_ids} for prompt_ids in listed]
    beside = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
    if len(beside) != len(listed):
        message = f"{len(beside)} prompts and {len(listed)} prompt_token_ids"
        raise InvalidRequest(message, "prompt_token_ids")
    parts = [one if isinstance(one, Mapping) else {TEXT: one} for one in beside]
    return [{**part, IDS: prompt_ids} for part, prompt_ids in zip(parts, listed, strict=True)]


def priorities_of(priority: Sequence[int] | None, count: int) -> list[int]:
    """Returns the priority of each of ``count`` prompts; 0 is the default.

    Raises:
        InvalidRequest: the numbers differ, or one is no integer of 32 bits.
    """
    if priority is None:
        return [0] * count
    listed = list(priority) if isinstance(priority, Sequence) else None
    if listed is None or not all(type(one) is int and one in PRIORITIES for one in listed):
        raise InvalidRequest("priority must be a list of integers of 32 bits.", "priority")
    if len(listed) != count:
        raise InvalidRequest(f"{count} prompts and {len(listed)} priority", "priority")
    return listed


def special_tokens(tokenization_kwargs: Mapping[str, Any] | None) -> bool:
    """Returns whether texts get the tokenizer's special tokens.

    Raises:
        InvalidRequest: another setting of tokenizers.
    """
    rest = dict(tokenization_kwargs or {})
    special = bool(rest.pop(SPECIAL, True))
    refuse(tokenization_kwargs=rest)
    return special
