"""Replaces transformers' mixtures of experts by grouped products on a GPU.

Shared experts stay; routers have a kernel of their own (`routers`). Only the loop over experts is
replaced, which waits for the device to learn the router's choice; the kernels read the choice on
the device. Experts of a quantised checkpoint stay codes: they are read and packed one after the
other, so that the device never holds plain ones.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from rayfin.actors.runner.gpu.quant_linear import TOLERANCE as CODES_TOLERANCE
from rayfin.actors.runner.models.inspect_decoder import ACTIVATIONS
from rayfin.actors.runner.models.inspect_layers import clamped_gate, gates_plainly, is_experts
from rayfin.actors.runner.models.paged_model import PagedModel
from rayfin.actors.runner.models.replace import PROBE_PAGE_SIZE, verified_replacement
from rayfin.actors.runner.quantized.experts import QuantExperts, quant_experts
from rayfin.actors.timing import LOAD_LOG_SECONDS
from rayfin.kernels.attention.triton_backend import LAUNCHES
from rayfin.kernels.cpu.experts import ClampedSwish, ExpertBiases
from rayfin.kernels.cpu.kernels import Activation
from rayfin.kernels.shapes import PagedBatch
from rayfin.kernels.triton.experts import MOST_FEW_ROWS, Experts, run_experts
from rayfin.kernels.triton.quantized import CodedWeight, pack_weight, stack_weights

logger = logging.getLogger(__name__)

NAMES = {
    Activation.SILU: "silu",
    Activation.GELU_TANH: "gelu_tanh",
    Activation.GELU: "gelu",
}
"""The Triton kernels' names of activations."""

TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The largest difference of logits that is accepted, as a share of the largest logit."""

PROBE_ROWS = 4


@dataclass(slots=True)
class Padding:
    """Which rows of a step are padding, for all mixtures of a model."""

    slots: torch.Tensor | None = None  # [T] int64, negative where they are; None: there is none

    @contextmanager
    def of(self, batch: PagedBatch) -> Iterator[None]:
        """Within it, mixtures compute the rows of ``batch``: only those of graphs have padding."""
        self.slots = batch.slots if LAUNCHES in batch.scratch else None
        try:
            yield
        finally:
            self.slots = None


class GroupedExperts(nn.Module):
    """Replaces transformers' experts: same arguments, no wait for the device.

    Plain weights are transformers' parameters, of which ``experts`` has views.
    """

    def __init__(
        self, experts: Experts, parameters: Mapping[str, nn.Parameter | None] | None = None
    ) -> None:
        super().__init__()
        self.experts = experts
        self.padding = Padding()
        for name, parameter in (parameters or {}).items():
            self.register_parameter(name, parameter)

    @property
    def coded_bytes(self) -> int:
        """Of weights that are codes."""
        weights = (self.experts.gate_up, self.experts.down)
        return sum(one.bytes for one in weights if isinstance(one, CodedWeight))

    def forward(
        self,
        hidden_states: torch.Tensor,  # [T, H]
        top_k_index: torch.Tensor,  # [T, K] int64
        top_k_weights: torch.Tensor,  # [T, K]
    ) -> torch.Tensor:
        """[T, H]."""
        routed = (top_k_index, top_k_weights, self.padding.slots)
        return run_experts(hidden_states, self.experts, *routed)


def padding_of(model: nn.Module) -> Padding:
    """Returns what all mixtures of a model read from now on; the same at each call."""
    mixtures = [module for module in model.modules() if isinstance(module, GroupedExperts)]
    padding = mixtures[0].padding if mixtures else Padding()
    for mixture in mixtures:
        mixture.padding = padding
    return padding


@torch.no_grad()
def pack_experts(model: PreTrainedModel) -> int:
    """Replaces experts that are codes, layer after layer; returns the bytes of their weights.

    A layer becomes plain if the kernels do not read its codes, or compute something else.
    """
    layers, size, plain = quant_experts(model), 0, list[str]()
    config = model.config.get_text_config(decoder=True)
    count, logged = len(layers), time.monotonic()
    while layers:
        if time.monotonic() - logged >= LOAD_LOG_SECONDS:
            logged = time.monotonic()
            logger.info("packed the experts of %d of %d layers", count - len(layers), count)
        owner, name, quant = layers.pop()
        packed = _packed(quant, config)
        why = packed if isinstance(packed, str) else _fault_of(packed, quant)
        if isinstance(packed, str) or why:
            plain.append(why)
            setattr(owner, name, quant.dequantized())
            continue
        size += packed.coded_bytes
        setattr(owner, name, packed)
    if size:
        logger.info("quantized experts stay in %d MiB of the GPU", size >> 20)
    if plain:
        logger.warning("the experts of %d layers are plain: %s", len(plain), plain[0])
    return size


def _packed(quant: QuantExperts, config: PretrainedConfig) -> GroupedExperts | str:
    """Returns the experts on kernels, or why they have none."""
    activation = _activation(quant.original, config)
    if activation is None:
        return "no kernel has their activation"
    gate_up, down = list[CodedWeight](), list[CodedWeight]()
    for expert in quant.experts:
        for layers, projection in zip(
            (gate_up, gate_up, down), (expert.gate, expert.up, expert.down), strict=True
        ):
            codes = pack_weight(projection.grouped(), quant.dtype)
            if codes is None or not codes.parted or codes.order is not None:
                return "no kernel reads their codes"
            layers.append(codes)
    whole = [stack_weights(layers) for layers in (gate_up, down)]
    if whole[0] is None or whole[1] is None:
        return "their codes are unlike"
    # Programs that share an output, and count one another, are of single weights.
    first, last = (replace(one, arrived=one.arrived[:0]) for one in whole if one is not None)
    return GroupedExperts(Experts(first, last, activation, quant.biases))


def _fault_of(packed: GroupedExperts, quant: QuantExperts) -> str:
    """Compares the first and the last expert with transformers' loop; returns "" if they agree.

    It does so once in tiles of few rows, and once in tiles of many. Else it returns the reason.
    """
    random = torch.Generator().manual_seed(7)
    device, last = packed.experts.down.words.device, len(quant.experts) - 1  # type: ignore[union-attr]
    for rows in (PROBE_ROWS, MOST_FEW_ROWS * len(quant.experts) // 2 + 1):
        x = torch.randn(rows, quant.hidden, generator=random).to(device, quant.dtype)
        chosen = torch.tensor([[0, last]], device=device).expand(rows, 2)
        weights = torch.tensor([[0.75, 0.25]], dtype=quant.dtype, device=device).expand(rows, 2)
        wanted = quant(x, chosen, weights).float()
        try:
            difference = (packed(x, chosen, weights).float() - wanted).norm()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # the compiler's, the launcher's or the device's
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0]}"
        if not difference <= CODES_TOLERANCE[quant.dtype] * wanted.norm():
            share = float(difference / wanted.norm().clamp(min=1e-30))
            return f"products of {rows} rows differ by {share:.1e}"
    return ""


@torch.inference_mode()
def group_experts(
    paged: PagedModel,
    page_size: int = PROBE_PAGE_SIZE,
    all_agree: Callable[[bool], bool] = bool,
) -> bool:
    """Replaces the plain experts of a model in place; of ranks, where they ``all_agree``.

    Returns False if there are none, or if logits would differ; then the model is unchanged.
    """
    config = paged.transformer.config.get_text_config(decoder=True)
    originals = [
        (owner, name, grouped)
        for owner in list(paged.transformer.modules())
        for name, child in list(owner.named_children())
        if (grouped := _grouped(child, config)) is not None
    ]
    if not originals or paged.dtype not in TOLERANCE:
        return False

    def build() -> Iterator[PagedModel]:
        for owner, name, grouped in originals:
            setattr(owner, name, grouped)
        yield paged

    tolerance = TOLERANCE[paged.dtype]
    return verified_replacement(paged, build, tolerance, page_size, all_agree) is not None


def _grouped(module: nn.Module, config: PretrainedConfig) -> GroupedExperts | None:
    """Returns the same weights on kernels; None if it is no mixture that they compute."""
    activation, weights = _activation(module, config), module._parameters
    if activation is None:
        return None
    gate_up, down = module.get_parameter("gate_up_proj"), module.get_parameter("down_proj")
    if not isinstance(activation, ClampedSwish):
        experts = Experts(gate_up.view(len(down), 2, -1, gate_up.shape[2]), down, activation)
        return GroupedExperts(experts, weights)
    bias, down_bias = (module.get_parameter(f"{name}_proj_bias") for name in ("gate_up", "down"))
    in_turn = gate_up.view(*gate_up.shape[:2], -1, 2).permute(0, 3, 2, 1)
    biases = ExpertBiases(torch.cat([bias[:, ::2], bias[:, 1::2]], dim=1), down_bias)
    return GroupedExperts(Experts(in_turn, down.mT, activation, biases), weights)


def _activation(module: nn.Module, config: PretrainedConfig) -> str | ClampedSwish | None:
    """Returns what experts in a form of the kernels compute of gate and up; None of others."""
    if (clamped := clamped_gate(module)) is not None:
        return clamped
    name: str = getattr(config, "hidden_activation", "") or getattr(config, "hidden_act", "")
    usual = ACTIVATIONS.get(name)
    if usual is None or not is_experts(module) or not gates_plainly(module):
        return None
    return NAMES[usual]
