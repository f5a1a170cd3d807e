"""Makes the proposer that the settings name."""

import torch

from rayfin.actors.config import EngineArgs, EngineConfig
from rayfin.actors.runner.loading import LoadedModel
from rayfin.actors.runner.models.paged_model import StepModel
from rayfin.actors.runner.proposers.draft_model import (
    DraftedModel,
    DraftModelProposer,
    with_draft,
)
from rayfin.actors.runner.proposers.eagle import with_eagle
from rayfin.actors.runner.proposers.eagle3 import with_eagle3
from rayfin.actors.runner.proposers.heads import HeadedModel, HeadProposer
from rayfin.actors.runner.proposers.interface import Proposer
from rayfin.actors.runner.proposers.mtp import with_mtp
from rayfin.actors.runner.proposers.ngram import NGramProposer
from rayfin.actors.runner.proposers.suffix import SuffixProposer
from rayfin.actors.runner.step.request_slots import RequestSlots

STEPPING = (DraftModelProposer, HeadProposer)
"""Proposers that compute a step for each token of a draft."""


def with_drafter(loaded: LoadedModel, args: EngineArgs) -> LoadedModel:
    """The model with the layers of the draft model or head that ``args`` names, if any.

    Raises:
        InvalidConfig: they cannot be loaded, or are of another model.
    """
    settings = args.speculation
    if settings is None or not settings.reads_states:
        return with_draft(loaded, args)
    if settings.method == "mtp":
        return with_mtp(loaded, args)
    with_head = with_eagle if settings.method == "eagle" else with_eagle3
    return with_head(loaded, args, str(settings.model))


def make_proposer(
    config: EngineConfig, model: StepModel, slots: RequestSlots, device: torch.device
) -> Proposer:
    """The proposer of ``config.speculation``, which must be set.

    Args:
        model: the runner's; with a draft model a ``DraftedModel``, with a head a ``HeadedModel``.
    """
    settings = config.speculation
    assert settings is not None
    count, length = config.limits.max_decoding_batch, config.max_model_len
    if isinstance(model, DraftedModel | HeadedModel):
        sizes = {
            "page_size": config.page_size,
            "max_len": length,
            "most_tokens": config.limits.max_batch_tokens,
        }
        if isinstance(model, HeadedModel):
            return HeadProposer(model, slots, device=device, **sizes)
        return DraftModelProposer(model, slots, device=device, **sizes)
    shortest, longest = settings.prompt_lookup_min, settings.prompt_lookup_max
    own = NGramProposer(count, length, shortest=shortest, longest=longest)
    if settings.method == "ngram":
        return own
    return SuffixProposer(
        count,
        length,
        most_texts=settings.suffix_decoding_max_cached_requests,
        factor=settings.suffix_decoding_max_spec_factor,
        own=own,
    )
