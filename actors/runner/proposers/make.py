"""Makes the proposer that the settings name."""

from rayfin.actors.config import EngineConfig
from rayfin.actors.runner.proposers.interface import Proposer
from rayfin.actors.runner.proposers.ngram import NGramProposer


def make_proposer(config: EngineConfig) -> Proposer:
    """The proposer of ``config.speculation``, which must be set."""
    settings = config.speculation
    assert settings is not None
    return NGramProposer(
        config.limits.max_decoding_batch,
        config.max_model_len,
        shortest=settings.prompt_lookup_min,
        longest=settings.prompt_lookup_max,
    )
