"""Makes the proposer that the settings name."""

from rayfin.actors.config import EngineConfig
from rayfin.actors.runner.proposers.interface import Proposer
from rayfin.actors.runner.proposers.ngram import NGramProposer
from rayfin.actors.runner.proposers.suffix import SuffixProposer


def make_proposer(config: EngineConfig) -> Proposer:
    """The proposer of ``config.speculation``, which must be set."""
    settings = config.speculation
    assert settings is not None
    slots, length = config.limits.max_decoding_batch, config.max_model_len
    shortest, longest = settings.prompt_lookup_min, settings.prompt_lookup_max
    own = NGramProposer(slots, length, shortest=shortest, longest=longest)
    if settings.method == "ngram":
        return own
    return SuffixProposer(
        slots,
        length,
        most_texts=settings.suffix_decoding_max_cached_requests,
        factor=settings.suffix_decoding_max_spec_factor,
        own=own,
    )
