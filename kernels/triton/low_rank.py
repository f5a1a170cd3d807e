"""Tables of adapters of low rank for one product, and what they add to its rows."""

from collections.abc import Sequence

import torch
import triton

from rayfin.kernels.triton.device import low_rank_kernels as kernels

RANKS_AT_ONCE = 8
INPUTS_AT_ONCE = 512
OUTPUTS_AT_ONCE = 128
MOST_PARTS = 3


class LowRankTable:
    """A and B of up to S adapters at fixed addresses, for layers with one input.

    An adapter of a lower rank than the table's has zeros behind it; one without a layer is zero.
    """

    def __init__(
        self,
        entries: int,
        rank: int,
        inputs: int,
        outputs: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert 0 < len(outputs) <= MOST_PARTS
        self._outputs, self._rank = outputs, rank
        ranks = len(outputs) * rank
        self._a = torch.zeros(entries, ranks, inputs, dtype=dtype, device=device)
        self._b = torch.zeros(entries, sum(outputs), rank, dtype=dtype, device=device)
        self._scales = torch.zeros(entries, len(outputs), dtype=torch.float32, device=device)

    def clear(self, entry: int) -> None:
        """Makes the adapter ``entry`` one that adds nothing."""
        for tensor in (self._a, self._b, self._scales):
            tensor[entry].zero_()

    def put(self, entry: int, part: int, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
        """Takes A [rank, inputs] and B [outputs, rank] of layer ``part``, in stream order."""
        rank, first = len(a), sum(self._outputs[:part])
        self._a[entry, part * self._rank : part * self._rank + rank].copy_(a)
        self._b[entry, first : first + len(b), :rank].copy_(b)
        self._scales[entry, part] = scale

    def add(self, x: torch.Tensor, out: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds to ``out`` [T, N] what the adapters of ``rows`` [T] int64 make of ``x`` [T, K].

        Rows with a negative number stay as they are.
        """
        tokens, inputs = x.shape
        parts, ranks = len(self._outputs), self._a.shape[1]
        assert x.stride(1) == 1 and out.is_contiguous() and out.shape[1] == self._b.shape[1]
        h = torch.empty(tokens, ranks, dtype=torch.float32, device=x.device)
        kernels.shrink[(tokens, triton.cdiv(ranks, RANKS_AT_ONCE))](
            x,
            self._a,
            rows,
            h,
            x.stride(0),
            K=inputs,
            RANKS=ranks,
            AT_ONCE=RANKS_AT_ONCE,
            BLOCK=INPUTS_AT_ONCE,
            num_warps=4,
        )
        first, second = self._outputs[0], sum(self._outputs[:2])  # those of one part are all
        kernels.expand[(tokens, triton.cdiv(out.shape[1], OUTPUTS_AT_ONCE))](
            h,
            self._b,
            self._scales,
            rows,
            out,
            N=out.shape[1],
            FIRST_END=first,
            SECOND_END=second,
            PARTS=parts,
            RANK=self._rank,
            WIDTH=triton.next_power_of_2(self._rank),
            BLOCK=OUTPUTS_AT_ONCE,
            num_warps=4,
        )
