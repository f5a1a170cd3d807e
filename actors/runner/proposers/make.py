"""Makes the proposer that the settings name.

What drafts with weights of its own is in ``stepping.py``: it brings transformers' modelling code,
which takes seconds to import, and which n-grams do without.
"""

from collections.abc import Callable

import torch

from rayfin.actors.config import EngineArgs, EngineConfig
from rayfin.actors.runner.loading import LoadedModel
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.proposers.interface import Proposer, Stepping
from rayfin.actors.runner.proposers.ngram import NGramProposer
from rayfin.actors.runner.proposers.suffix import SuffixProposer
from rayfin.actors.runner.step.request_slots import RequestSlots


def with_drafter(loaded: LoadedModel, args: EngineArgs) -> LoadedModel:
    """The model with the layers of the draft model or head that ``args`` names, if any.

    Raises:
        InvalidConfig: they cannot be loaded, or are of another model.
    """
    if args.speculation is None or not args.speculation.one_device:
        return loaded
    from rayfin.actors.runner.proposers.stepping import with_weights

    return with_weights(loaded, args, args.speculation)


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
        from rayfin.actors.runner.proposers.stepping import make_stepping

        return make_stepping(config, model, slots, device)
    count, length = config.limits.max_decoding_batch, config.max_model_len
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


def draft_seconds(made: Proposer) -> Callable[[int], float] | None:
    """What says how long drafting a token takes for so many rows; None if it computes no steps."""
    return made.seconds if isinstance(made, Stepping) else None
