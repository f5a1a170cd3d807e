"""Runs a mixture of experts in one call of the compiled kernels (kernels/cpu/layers/experts.h)."""

import ctypes

import torch

from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Pack


class _Experts(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("count", "hidden", "intermediate", "activation")),
    ]


class _Routing(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("chosen", "weights")),
        *((name, ctypes.c_int64) for name in ("rows", "top_k")),
    ]


class PackedExperts:
    """Packed weights of E experts."""

    def __init__(
        self,
        kernels: CpuKernels,
        gate_up: torch.Tensor,  # [E, 2 F, H], gate above up
        down: torch.Tensor,  # [E, H, F]
        activation: Activation,
        pack: Pack | None = None,  # ``CpuKernels.pack`` by default
    ) -> None:
        count, hidden, intermediate = down.shape
        assert gate_up.shape == (count, 2 * intermediate, hidden), gate_up.shape
        self._kernels, self.hidden = kernels, hidden
        pack = pack or kernels.pack
        self.gate_up = [pack([one], paired=True) for one in gate_up]
        self.down = [pack([one]) for one in down]
        pointers = ctypes.c_void_p * count
        self._handles = [
            pointers(*(matrix.handle for matrix in some)) for some in (self.gate_up, self.down)
        ]
        self._struct = _Experts(
            *(ctypes.addressof(handles) for handles in self._handles),
            count,
            hidden,
            intermediate,
            activation,
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
