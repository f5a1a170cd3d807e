"""Replaces transformers' mixtures of experts by grouped products on a GPU.

The model's router and shared experts stay. Only the loop over experts is replaced, which waits for
the device to learn the router's choice; the kernels read the choice on the device.
"""

from collections.abc import Iterator

import torch
from torch import nn

from rayfin.actors.runner.models.inspect_decoder import ACTIVATIONS
from rayfin.actors.runner.models.inspect_layers import gates_plainly, is_experts
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.replace import PROBE_PAGE_SIZE, verified_replacement
from rayfin.kernels.cpu.kernels import Activation
from rayfin.kernels.triton.experts import run_experts

NAMES = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_tanh",
    Activation.GELU: "gelu",
}
"""The Triton kernels' names of activations."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The largest difference of logits that is accepted, as a share of the largest logit."""


class GroupedExperts(nn.Module):
    """Replaces transformers' experts: same weights and arguments, no wait for the device."""

    def __init__(self, gate_up: nn.Parameter, down: nn.Parameter, activation: str) -> None:
        super().__init__()
        self.gate_up_proj = gate_up  # [E, 2 F, H]
        self.down_proj = down  # [E, H, F]
        self._activation = activation

    def forward(
        self,
        hidden_states: torch.Tensor,  # [T, H]
        top_k_index: torch.Tensor,  # [T, K] int64
        top_k_weights: torch.Tensor,  # [T, K]
    ) -> torch.Tensor:
        """[T, H]."""
        weights = (self.gate_up_proj, self.down_proj)
        return run_experts(hidden_states, *weights, top_k_index, top_k_weights, self._activation)


@torch.inference_mode()
def group_experts(paged: PagedModel, page_size: int = PROBE_PAGE_SIZE) -> bool:
    """Replaces the experts of a model in place.

    Returns False if there are none, or if logits would differ; then the model is unchanged.
    """
    config = paged.transformer.config.get_text_config(decoder=True)
    activation = ACTIVATIONS.get(getattr(config, "hidden_act", ""))
    originals = list(_experts(paged.transformer))
    if not originals or activation is None or paged.dtype not in TOLERANCE:
        return False

    def build() -> Iterator[PagedModel]:
        for owner, name, module in originals:
            weights = dict(module.named_parameters(recurse=False))
            gate_up, down = weights["gate_up_proj"], weights["down_proj"]
            setattr(owner, name, GroupedExperts(gate_up, down, NAMES[activation]))
        yield paged

    return verified_replacement(paged, build, TOLERANCE[paged.dtype], page_size) is not None


def _experts(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if is_experts(child) and gates_plainly(child):
                yield owner, name, child
