"""Replaces a model or its modules by faster ones, if both give the same logits for a probe."""

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from transformers import PreTrainedModel

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.models.recurrent import RecurrentLayers
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.state_tensors import StateTensors
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.shapes import PagedBatch

logger = logging.getLogger(__name__)

PROBE_TOKENS = 24
PROBE_PAGE_SIZE = 8

ROUNDED_ROWS = 0.1
"""The difference of logits that is accepted of models whose layers round the rows they multiply.

Where sums differ in their last bits a number is rounded to the next one, and later layers carry on:
28 layers of Q4_0 with random weights were 2.6 % apart.
"""

Model = TypeVar("Model", bound=StepModel)


@runtime_checkable
class ManySteps(StepModel, Protocol):
    """A model that computes steps that follow one another better together."""

    def forward_each(self, steps: Sequence[StepInputs]) -> list[torch.Tensor]: ...


class Replaceable(StepModel, Protocol):
    """A model over modules of transformers', which may be replaced in place."""

    @property
    def transformer(self) -> PreTrainedModel: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def recurrent(self) -> RecurrentLayers | None: ...


def accepted_difference(model: PreTrainedModel, tolerance: float) -> float:
    """``tolerance`` of exact layers, more if some of the model's round their rows."""
    rounds = any(getattr(module, "rounds_rows", False) for module in model.modules())
    return max(tolerance, ROUNDED_ROWS if rounds else 0.0)


def verified_replacement(
    paged: Replaceable,
    build: Callable[[], Iterable[Model]],
    tolerance: float,
    page_size: int = PROBE_PAGE_SIZE,
    all_agree: Callable[[bool], bool] = bool,
) -> Model | None:
    """Returns the last model that ``build`` yields, or None if ``paged`` has to stay as it is.

    ``build`` yields its model once for each path through it, and each time the model's logits are
    compared. A build may replace modules of ``paged`` in place and yield ``paged``. The modules
    are put back if logits differ by more than ``tolerance`` (a share of the largest logit), if
    ``build`` raises UnrecognizedModule, or if the model then needs a weight that is gone.

    Args:
        all_agree: of ranks that share the model, which go one way: each says whether logits agree.
    """
    name = type(paged.transformer).__name__
    originals = [
        (owner, child_name, child)
        for owner in paged.transformer.modules()
        for child_name, child in owner.named_children()
    ]
    expected = probe_logits(paged, paged, page_size)
    model: Model | None = None
    try:
        for model in build():
            difference = logit_difference(model, paged, expected, page_size)
            if not all_agree(difference <= tolerance):
                logger.warning("%s is not replaced: logits would differ by %.1e", name, difference)
                break
        else:
            return model
    except UnrecognizedModule as error:
        logger.info("%s is not replaced: %s", name, error)
    except (AttributeError, RuntimeError) as error:
        if model is not paged:
            raise
        logger.info("%s keeps its modules: %s", name, error)
    for owner, child_name, child in originals:
        if getattr(owner, child_name, None) is not child:
            setattr(owner, child_name, child)
    return None


def logit_difference(
    model: StepModel, paged: Replaceable, expected: torch.Tensor, page_size: int = PROBE_PAGE_SIZE
) -> float:
    """How far the model's probe logits are from ``expected``, as a share of the largest one."""
    difference = (probe_logits(model, paged, page_size) - expected).abs().max()
    return float(difference / expected.abs().max().clamp(min=1e-6))


def probe_logits(
    model: StepModel, paged: Replaceable, page_size: int = PROBE_PAGE_SIZE
) -> torch.Tensor:
    """Logits [PROBE_TOKENS, V] fp32 of a prompt in four chunks and of one decoded token.

    The last chunks are of 4, 2 and 1 tokens, for which a GPU has kernels of their own.

    The probe has its own pages. On a GPU they have the engine's ``page_size``, since kernels are
    compiled for it.
    """
    vocabulary = paged.transformer.config.get_text_config(decoder=True).vocab_size
    tokens = (torch.arange(PROBE_TOKENS, device=paged.device) * 7919 + 11) % vocabulary
    last = PROBE_TOKENS - 1
    cuts = [0, last // 2, last - 6, last - 2, last, PROBE_TOKENS]
    return chunked_logits(model, paged, tokens, cuts, page_size)


def chunked_logits(
    model: StepModel,
    paged: Replaceable,
    tokens: torch.Tensor,
    cuts: Sequence[int],
    page_size: int = PROBE_PAGE_SIZE,
    slot: int | None = None,
) -> torch.Tensor:
    """Logits [T, V] fp32 of ``tokens`` [T], computed in chunks that start and end at ``cuts``.

    Args:
        slot: of the request that they belong to, where the model keeps something by slot.
    """
    device = paged.device
    pages = -(-len(tokens) // page_size)
    cache = KVTensors(paged.layouts, pages, page_size, paged.dtype, paged.device)
    model.bind(cache)
    if paged.recurrent is not None:
        paged.recurrent.bind(StateTensors(paged.recurrent.layouts, 1, 0, paged.device))
    steps = []
    for start, end in pairwise(cuts):
        positions = torch.arange(start, end, device=device)
        starts, lengths = np.array([0, end - start], np.int32), np.array([end], np.int32)
        batch = PagedBatch(
            query_start=torch.from_numpy(starts).to(device),
            kv_len=torch.from_numpy(lengths).to(device),
            page_tables=torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0),
            slots=positions,
            positions=positions,
            query_start_cpu=starts,
            kv_len_cpu=lengths,
            decoding=int(start > 0 and end - start == 1),
            page_size=page_size,
        )
        every = torch.arange(end - start, device=device)
        inputs = StepInputs(tokens[start:end], batch, every)
        if slot is not None:
            inputs.slots = np.array([slot], np.int32)
        steps.append(inputs)
    if isinstance(model, ManySteps):
        logits = model.forward_each(steps)
    else:
        logits = [model.forward(step) for step in steps]
    model.bind(KVTensors(paged.layouts, 0, page_size, paged.dtype, paged.device))
    return torch.cat(logits).float()
