"""Makes what drafts with weights: a draft model or a head, which computes a step for each token."""

import torch

from rayfin.actors.config import EngineArgs, EngineConfig
from rayfin.actors.runner.loading import LoadedModel
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.speculation.draft_model import (
    DraftedModel,
    DraftModelProposer,
    with_draft,
)
from rayfin.actors.runner.speculation.eagle import with_eagle
from rayfin.actors.runner.speculation.eagle3 import with_eagle3
from rayfin.actors.runner.speculation.heads import HeadedModel, HeadProposer
from rayfin.actors.runner.speculation.mtp import with_mtp
from rayfin.actors.speculation import SpeculativeConfig


def with_weights(loaded: LoadedModel, args: EngineArgs, settings: SpeculativeConfig) -> LoadedModel:
    """The model with the layers of the draft model or head of ``settings``.

    Raises:
        InvalidConfig: they cannot be loaded, or are of another model.
    """
    if not settings.reads_states:
        return with_draft(loaded, args)
    if settings.method == "mtp":
        return with_mtp(loaded, args)
    with_head = with_eagle if settings.method == "eagle" else with_eagle3
    return with_head(loaded, args, str(settings.model))


def make_stepping(
    config: EngineConfig, model: StepModel, slots: RequestSlots, device: torch.device
) -> DraftModelProposer | HeadProposer:
    """The proposer of a model that ``with_weights`` has given layers that draft."""
    sizes = {
        "page_size": config.page_size,
        "max_len": config.max_model_len,
        "most_tokens": config.limits.max_batch_tokens,
    }
    if isinstance(model, HeadedModel):
        return HeadProposer(model, slots, device=device, **sizes)
    assert isinstance(model, DraftedModel)
    return DraftModelProposer(model, slots, device=device, **sizes)
