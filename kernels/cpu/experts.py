"""Runs a mixture of experts in one call of the compiled kernels (kernels/cpu/layers/experts.h)."""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Matrix, Pack


class _Experts(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "gate_up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "intermediate", "activation")),
        *((name, ctypes.c_float) for name in ("slope", "limit")),
    ]


class _Routing(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("chosen", "weights")),
        *((name, ctypes.c_int64) for name in ("rows", "top_k")),
    ]


@dataclass(frozen=True, slots=True)
class ClampedSwish:
    """gpt-oss' gated activation: (1 + up) * gate * sigmoid(slope * gate).

    The gate is at most ``limit``, up is within +-``limit``.
    """

    slope: float
    limit: float


Gate = Activation | ClampedSwish
"""act(gate) * up, or a form of its own."""


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """What each expert adds to its products."""

    gate_up: torch.Tensor  # [E, 2 F], gate before up
    down: torch.Tensor  # [E, H]


class PackedExperts:
    """Packed weights of E experts: ``gate_up`` are paired matrices, as many as ``down``."""

    def __init__(
        self,
        kernels: CpuKernels,
        gate_up: Sequence[Matrix],
        down: Sequence[Matrix],
        gate: Gate,
        biases: ExpertBiases | None = None,
    ) -> None:
        count, hidden, intermediate = len(down), down[0].outputs, down[0].inputs
        assert len(gate_up) == count and all(one.paired for one in gate_up)
        assert all((one.columns, one.inputs) == (intermediate, hidden) for one in gate_up)
        self._kernels, self.hidden = kernels, hidden
        self.gate_up, self.down = list(gate_up), list(down)
        pointers = ctypes.c_void_p * count
        self._handles = [
            pointers(*(matrix.handle for matrix in some)) for some in (self.gate_up, self.down)
        ]
        self._biases: list[torch.Tensor] = []
        if biases is not None:
            self._biases = [
                one.detach().float().contiguous() for one in (biases.gate_up, biases.down)
            ]
            assert [one.shape for one in self._biases] == [
                (count, 2 * intermediate),
                (count, hidden),
            ]
        clamped = gate if isinstance(gate, ClampedSwish) else ClampedSwish(1.0, 0.0)
        self._struct = _Experts(
            *(ctypes.addressof(handles) for handles in self._handles),
            *([one.data_ptr() for one in self._biases] or (None, None)),
            count,
            hidden,
            intermediate,
            Activation.CLAMPED_SWISH if isinstance(gate, ClampedSwish) else gate,
            clamped.slope,
            clamped.limit,
        )
        self._workspace = torch.empty(0)

    def run(
        self,
        x: torch.Tensor,  # [T, H] float32
        chosen: torch.Tensor,  # [T, K] int64; ids that do not exist are ignored
        weights: torch.Tensor,  # [T, K] float32
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts' outputs [T, H], in the order of ``chosen``.

        A row's result does not depend on the other rows, to the last bit.
        """
        x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
        assert x.shape[1] == self.hidden and x.dtype == weights.dtype == torch.float32
        assert chosen.shape == weights.shape and len(chosen) == len(x)
        assert chosen.dtype == torch.int64
        library, experts = self._kernels.library, ctypes.byref(self._struct)
        needed = library.rayfin_experts_workspace(experts, *chosen.shape)
        if needed > len(self._workspace):
            self._workspace = torch.empty(needed)
        out = torch.empty_like(x)
        routing = _Routing(chosen.data_ptr(), weights.data_ptr(), *chosen.shape)
        library.rayfin_experts_run(
            self._kernels.pool,
            experts,
            ctypes.byref(routing),
            x.data_ptr(),
            self._workspace.data_ptr(),
            out.data_ptr(),
        )
        return out


def pack_experts(
    kernels: CpuKernels,
    gate_up: Iterable[torch.Tensor],  # E times [2 F, H], gate above up
    down: Iterable[torch.Tensor],  # E times [H, F]
    gate: Gate,
    pack: Pack | None = None,  # ``CpuKernels.pack`` by default
    biases: ExpertBiases | None = None,
) -> PackedExperts:
    """Packs the weights of experts, one after the other."""
    pack = pack or kernels.pack
    first = [pack([one], paired=True) for one in gate_up]
    return PackedExperts(kernels, first, [pack([one]) for one in down], gate, biases)
