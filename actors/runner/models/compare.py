"""Compares a paged model with transformers' own ``generate``, and refuses a model that differs.

A model may attend in a way that only the mask knows that transformers builds for it, or keep what
its cache does not show. Such a model gives other tokens beyond a window or behind the first chunk.
So each model generates a few tokens at load, behind a prompt that is longer than all of its windows
(they are cut short for the time), and its pages must give the same logits in chunks.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from rayfin.actors.errors import UnsupportedModel
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel, set_attention
from rayfin.actors.runner.models.replace import accepted_difference, chunked_logits

logger = logging.getLogger(__name__)

PAGE_SIZE, LONGEST_WINDOW = 8, 16
"""Tokens of a page, to which windows are cut as well; and the most of them."""

PROMPT, STEPS = 27, 3
"""Tokens of the prompt, of which several chunks lie beyond a window, and tokens after it."""

CHUNKS = [0, 1, 12, PROMPT]

WINDOWS = (
    "attention_chunk_size",
    "attention_window_size",
    "index_topk",
    "local_attention",
    "sliding_window",
    "window_size",
)
"""What configs and modules call the number of tokens that a layer sees at most."""

TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.1}
"""Largest difference of logits, as a share of the largest one, of most of the tokens."""


def require_equal(paged: PagedModel, page_size: int = PAGE_SIZE) -> None:
    """Compares, on pages of ``page_size`` tokens where kernels are compiled for it.

    A model that differs is tried with the window of its config for all layers, which its mask may
    apply, and one whose layers keep states with prompts that continue token by token.

    Raises:
        UnsupportedModel: the logits differ.
    """
    began, model = time.perf_counter(), paged.transformer
    size = page_size if paged.device.type == "cuda" and page_size <= LONGEST_WINDOW else PAGE_SIZE
    with _short_windows(model, size):
        expected = _generated(model)
        if expected is None:
            return
        tokens, logits = expected
        difference = _difference(paged, tokens, logits, size)
        tolerance = accepted_difference(model, TOLERANCE.get(paged.dtype, 0.25))
        if difference > tolerance and paged.limit_by_mask():
            difference = _difference(paged, tokens, logits, size)
        if difference > tolerance and paged.recurrent is not None:
            paged.recurrent.stepwise = True
            difference = _difference(paged, tokens, logits, size)
    seconds = time.perf_counter() - began
    logger.info("compared with transformers: %.1e apart, in %.2f s", difference, seconds)
    if not difference <= tolerance:
        name = type(model).__name__
        raise UnsupportedModel(
            f"{name} cannot be served: over pages its logits differ from those of transformers' "
            f"generate by {difference:.1e} of the largest one",
            "model",
        )


def _difference(
    paged: PagedModel, tokens: torch.Tensor, expected: torch.Tensor, page_size: int
) -> float:
    cuts = [*CHUNKS, *range(PROMPT + 1, len(tokens) + 1)]
    logits = chunked_logits(paged, paged, tokens, cuts, page_size)[PROMPT - 1 :]
    apart = (logits - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-6)
    # Not the largest: in low precision a token may be routed to another expert by chance.
    return float(apart.median())


@torch.inference_mode()
def _generated(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tokens [T] that transformers has computed, and the logits [STEPS, V] fp32 of the last ones.

    None if the model cannot generate, or gives no finite logits.
    """
    generates: Any = model
    special = _special_tokens(model)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    drawn = ((7919 * index + 11) % vocabulary for index in range(PROMPT + len(special)))
    plain = [token for token in drawn if token not in special]
    prompt = torch.tensor(plain[:PROMPT], device=model.device)
    config = generates.generation_config
    make: Any = GenerationConfig
    settings = make(max_new_tokens=STEPS, do_sample=False, suppress_tokens=sorted(special) or None)
    set_attention(model, "eager")
    try:
        generates.generation_config = settings
        output = generates.generate(
            prompt.unsqueeze(0),
            attention_mask=torch.ones_like(prompt).unsqueeze(0),
            output_logits=True,
            return_dict_in_generate=True,
        )
    finally:
        generates.generation_config = config
        set_attention(model, ATTENTION)
    logits = torch.cat(output.logits).float()
    tokens = output.sequences[0, : PROMPT + STEPS - 1]
    return (tokens, logits) if bool(torch.isfinite(logits).all()) else None


def _special_tokens(model: PreTrainedModel) -> set[int]:
    """Tokens that a config names, such as those in whose place a model puts images."""
    configs = [model.config, model.config.get_text_config(decoder=True)]
    fields = [field for config in configs for field in vars(config).items()]
    return {
        value
        for name, value in fields
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }


@contextmanager
def _short_windows(model: PreTrainedModel, size: int) -> Iterator[None]:
    """Within it, all windows of the model are at most ``size`` tokens."""
    modules: list[Any] = list(model.modules())
    configs = {
        id(part): part for part in (vars(module).get("config") for module in modules) if part
    }
    changed: list[tuple[Any, str, int]] = []
    for owner in (*configs.values(), *modules):
        for name in WINDOWS:
            value = vars(owner).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > size:
                changed.append((owner, name, value))
                setattr(owner, name, size)
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)
