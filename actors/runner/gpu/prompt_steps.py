"""Steps with prompts from their inputs to their tokens: a graph of layers, and one of the head.

The layers are recorded by the number of tokens (`prompt_graphs`). Norm, head and sampling behind
them are recorded by the number of rows. Rows whose prompts go on are among these; what they sample
is dropped.
"""

from collections.abc import Callable

import torch

from rayfin.actors.messages import BoolArray, Int64Array, SchedulerInfo
from rayfin.actors.runner.gpu.decode_state import DecodeState, bucket_of
from rayfin.actors.runner.gpu.graph_extras import GraphExtras
from rayfin.actors.runner.gpu.prompt_graphs import PromptGraphs, Record
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.kernels.triton.sample import sample


def row_buckets(max_rows: int) -> list[int]:
    """Returns how many rows get a graph of the head, ascending: each twice the one before."""
    doubled = (1 << power for power in range(max_rows.bit_length()))
    return [*(size for size in doubled if size < max_rows), max_rows]


class PromptSteps:
    """Runs steps with prompts whose rows are sampled without rules, of as many rows as ``state``.

    The rows' settings are those of the decode ``state``, and their tokens are written to its slots
    on the device, as decode graphs do: either kind of step may be behind the other.
    """

    def __init__(
        self,
        layers: PromptGraphs,
        state: DecodeState,
        extras: GraphExtras,
        record: Record,
    ) -> None:
        self._layers, self._state, self._extras, self._record = layers, state, extras, record
        max_rows, device = len(state.tokens), state.tokens.device
        self._sizes = row_buckets(max_rows)
        shape = max_rows, layers.model.hidden_size
        self._ends = torch.zeros(shape, dtype=layers.dtype, device=device)
        self._numbers = torch.arange(max_rows, device=device)
        self._heads: dict[tuple[int, bool], Callable[[], None]] = {}
        for size in reversed(self._sizes):
            self._head(size, logprobs=False)

    def holds(self, info: SchedulerInfo) -> bool:
        """Returns whether graphs hold the step."""
        return len(info.ids) <= self._sizes[-1] and self._layers.holds(info)

    def run(
        self,
        info: SchedulerInfo,
        slots: RequestSlots,
        unread: BoolArray,
        num_logprobs: Int64Array | None,
    ) -> list[torch.Tensor]:
        """Queues a step; returns what its rows sample [R or more], until another step is queued.

        With ``num_logprobs`` [R] that and the rows' log probabilities: those who ask for none have
        ``NO_LOGPROBS``.

        Args:
            unread: by slot, whether only the device has its last token.
        """
        rows = bucket_of(len(info.ids), self._sizes)
        assert rows is not None
        state, layers = self._state, self._layers
        # Before the load: to record runs the head.
        head = self._head(rows, logprobs=num_logprobs is not None)
        state.load_ends(info, rows, layers.tables)
        stream = layers.run(info, slots, unread, state.last_tokens)
        if (info.last_pos >= 0).any():
            torch.index_select(stream, 0, state.tokens[:rows], out=self._ends[:rows])
            if num_logprobs is not None:
                self._extras.load(None, num_logprobs, rows)
            head()
        logprobs = [] if num_logprobs is None else self._extras.outputs(rows)
        return [state.sampled[:rows], *logprobs]

    def _head(self, rows: int, *, logprobs: bool) -> Callable[[], None]:
        """Returns the recorded head; records one with log probabilities at its first use."""
        if (rows, logprobs) not in self._heads:
            self._state.empty(self._sizes[-1])  # to record samples for no slot
            self._heads[rows, logprobs] = self._record(self._step(rows, logprobs))
        return self._heads[rows, logprobs]

    def _step(self, rows: int, logprobs: bool) -> Callable[[], None]:
        model, state = self._layers.model, self._state
        ends, numbers, sampling = self._ends[:rows], self._numbers[:rows], state.sampling(rows)
        sampled, early = state.sampled[:rows], model.starts_early(rows)

        @torch.inference_mode()
        def head() -> None:
            torch.add(state.positions[:rows], 1, out=sampling.position)
            logits = model.logits(ends, numbers)
            sample(logits, sampling, out=sampled, pdl=early)
            if logprobs:
                self._extras.record_logprobs(logits, sampled, state.remaining[:rows])
            state.finish(rows)

        return head
