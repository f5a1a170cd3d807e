"""Speculation that an engine chooses by itself, where no setting names a method."""

from typing import TYPE_CHECKING

from rayfin.actors.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from rayfin.actors.config import EngineArgs, ModelFacts


def chosen_speculation(args: "EngineArgs", facts: "ModelFacts") -> SpeculativeConfig | None:
    """Who drafts in an engine of these settings: what they say, or ``ngram`` on one CPU device.

    An n-gram costs a lookup. A step has a draft only where it gains time, and no token changes. So
    it is on wherever it needs no memory: recurrent layers would keep states for drafts, and ranks
    measure no times. On a GPU steps with drafts leave the CUDA graphs. Without the compiled kernels
    the last bits of a logit depend on how many tokens a step computes.
    """
    if args.sets_speculation:
        return args.speculation
    alone = args.tensor_parallel_size * args.pipeline_parallel_size == 1
    decodes = bool(facts.page_bytes) and not facts.state_bytes and not facts.whole_prompts
    decodes = decodes and facts.fixed_bits and not facts.pools
    if facts.device != "cpu" or args.scheduler != "v1" or not alone or not decodes:
        return None
    return SpeculativeConfig(method="ngram")
