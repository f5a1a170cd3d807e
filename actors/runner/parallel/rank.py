"""Where a runner stands in its group: which stage of the layers, which share of each layer."""

from dataclasses import dataclass

from rayfin.actors.config import EngineArgs

Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True)
class ParallelRank:
    """One of ``stages`` x ``tensor_size`` runners: ranks count through a stage, then the next one.

    The last stage has the logits; its first rank answers for all.
    """

    rank: int
    tensor_size: int
    stages: int
    store: Address  # where the ranks find each other: rank 0's
    host: str  # this rank's own address

    @property
    def size(self) -> int:
        """Runners of the group."""
        return self.tensor_size * self.stages

    @property
    def stage(self) -> int:
        return self.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def answers(self) -> bool:
        return self.is_last and self.tensor_rank == 0

    def layers(self, total: int) -> range:
        """This stage's share of the model's layers: consecutive ones, as evenly as they go."""
        return range(total * self.stage // self.stages, total * (self.stage + 1) // self.stages)


def group_size(args: EngineArgs) -> int:
    """Runners of an engine."""
    return args.tensor_parallel_size * args.pipeline_parallel_size
