"""A runner's place in its group: its pipeline stage and its tensor rank."""

from dataclasses import dataclass

from rayfin.actors.config import EngineArgs

Address = tuple[str, int]
"""Host and port."""


@dataclass(frozen=True, slots=True)
class ParallelRank:
    """One of ``stages`` x ``tensor_size`` runners; ranks are numbered stage by stage.

    The last stage has the logits. Its first rank returns the results of the group.
    """

    rank: int
    tensor_size: int
    stages: int
    store: Address  # rank 0's store, through which ranks connect
    host: str  # this rank's address

    @property
    def size(self) -> int:
        """The number of runners."""
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
        """The consecutive layers of this stage, split as evenly as possible."""
        return range(total * self.stage // self.stages, total * (self.stage + 1) // self.stages)


def group_size(args: EngineArgs) -> int:
    """The number of runners of an engine."""
    return args.tensor_parallel_size * args.pipeline_parallel_size
