"""Makes the proposer that the settings name."""

import torch

from rayfin.actors.config import EngineConfig
from rayfin.actors.runner.models.paged_model import StepModel
from rayfin.actors.runner.proposers.draft_model import DraftedModel, DraftModelProposer
from rayfin.actors.runner.proposers.interface import Proposer
from rayfin.actors.runner.proposers.ngram import NGramProposer
from rayfin.actors.runner.proposers.suffix import SuffixProposer
from rayfin.actors.runner.step.request_slots import RequestSlots


def make_proposer(
    config: EngineConfig, model: StepModel, slots: RequestSlots, device: torch.device
) -> Proposer:
    """The proposer of ``config.speculation``, which must be set.

    Args:
        model: the runner's; with a draft model a ``DraftedModel``.
    """
    settings = config.speculation
    assert settings is not None
    count, length = config.limits.max_decoding_batch, config.max_model_len
    if isinstance(model, DraftedModel):
        return DraftModelProposer(
            model,
            slots,
            page_size=config.page_size,
            max_len=length,
            most_tokens=config.limits.max_batch_tokens,
            device=device,
        )
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
