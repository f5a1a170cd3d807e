"""Makes the proposer that the settings name, and the speculator around it.

What drafts with weights of its own is imported where it is asked for: it brings transformers'
modelling code, which takes seconds, and which n-grams do without.
"""

from collections.abc import Callable

import torch

from rayfin.actors.config import EngineArgs, EngineConfig
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.loading import BASE, LoadedModel
from rayfin.actors.runner.measured_step import measure_steps
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.sampling.sampler import Sampler
from rayfin.actors.runner.speculation.interface import Proposer, Stepping
from rayfin.actors.runner.speculation.ngram import NGramProposer
from rayfin.actors.runner.speculation.planner import DraftPlanner
from rayfin.actors.runner.speculation.speculator import Speculator
from rayfin.actors.runner.speculation.suffix import SuffixProposer
from rayfin.actors.step_cost import StepCost
from rayfin.actors.weights.version import WeightVersion


def with_speculation(
    loaded: LoadedModel, args: EngineArgs, version: WeightVersion = BASE
) -> LoadedModel:
    """The model with the layers of the draft model or head that ``args`` names, if any.

    Raises:
        InvalidConfig: they cannot be loaded, or are of another model.
    """
    settings = args.speculation
    if settings is None or not settings.one_device:
        return loaded
    from rayfin.actors.runner.speculation import draft_model, eagle, eagle3, mtp

    if not settings.reads_states:
        return draft_model.with_draft(loaded, args, version)
    if settings.method == "mtp":
        return mtp.with_mtp(loaded, args, version)
    with_head = eagle.with_eagle if settings.method == "eagle" else eagle3.with_eagle3
    return with_head(loaded, args, str(settings.model), version)


def make_proposer(
    config: EngineConfig, model: StepModel, slots: RequestSlots, device: torch.device
) -> Proposer:
    """The proposer of ``config.speculation``, which must be set.

    Args:
        model: the runner's; with a draft model a ``DraftedModel``, with a head a ``HeadedModel``.
    """
    settings = config.speculation
    assert settings is not None
    if settings.one_device:
        return _make_stepping(config, model, slots, device)
    count, length = config.limits.max_decoding_batch, config.max_model_len
    shortest, longest = settings.prompt_lookup_min, settings.prompt_lookup_max
    ngrams = NGramProposer(count, length, shortest=shortest, longest=longest)
    if settings.method == "ngram":
        return ngrams
    return SuffixProposer(
        count,
        length,
        most_texts=settings.suffix_decoding_max_cached_requests,
        factor=settings.suffix_decoding_max_spec_factor,
        ngrams=ngrams,
    )


def _make_stepping(
    config: EngineConfig, model: StepModel, slots: RequestSlots, device: torch.device
) -> Proposer:
    """Makes the proposer of a model that ``with_speculation`` has given layers that draft."""
    from rayfin.actors.runner.speculation.draft_model import DraftedModel, DraftModelProposer
    from rayfin.actors.runner.speculation.heads import HeadedModel, HeadProposer

    sizes = {
        "page_size": config.page_size,
        "max_len": config.max_model_len,
        "most_tokens": config.limits.max_batch_tokens,
    }
    if isinstance(model, HeadedModel):
        return HeadProposer(model, slots, device=device, **sizes)
    assert isinstance(model, DraftedModel)
    return DraftModelProposer(model, slots, device=device, **sizes)


def make_speculator(
    plugin: Callable[[], Proposer] | None,
    args: EngineArgs,
    config: EngineConfig,
    loaded: LoadedModel,
    forward: Callable[[StepInputs], torch.Tensor],
    slots: RequestSlots,
    sampler: Sampler,
    cost: StepCost | None = None,
) -> Speculator | None:
    """Makes the speculator of a start; None if nothing drafts.

    Args:
        plugin: makes a proposer in place of the one that the settings name.
        forward: computes a step.
        cost: of steps, if known; else some are measured, which write over pages.
    """
    settings, named = config.speculation, args.sets_speculation
    if plugin is None and settings is None:
        return None
    device = loaded.device
    proposer = plugin() if plugin else make_proposer(config, loaded.model, slots, device)
    adaptive = settings is not None and settings.adaptive and (named or plugin is None)
    follow = loaded.peers is None  # ranks would measure different times
    if cost is None:
        cost = StepCost.assumed()
        if adaptive and follow:
            cost = measure_steps(forward, config, device, loaded.states, few=not named)
    planner = DraftPlanner(
        config.limits.max_decoding_batch,
        config.num_speculative_tokens,
        cost,
        adaptive=adaptive,
        follow=follow,
        draft_seconds=proposer.seconds if isinstance(proposer, Stepping) else None,
    )
    return Speculator(proposer, slots, sampler, device, config.limits, planner, loaded.states)
