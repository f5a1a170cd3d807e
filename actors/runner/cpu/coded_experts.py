"""Experts of a quantised checkpoint on the compiled kernels, as small as in the checkpoint.

They are packed out of the mapped files, one expert after the other, and some of them are compared
with transformers' own loop over the weights that the codes stand for.
"""

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from rayfin.actors.runner.cpu.build_decoder import TOLERANCE
from rayfin.actors.runner.cpu.packed_experts import PackedExpertsModule
from rayfin.actors.runner.models.inspect_decoder import ACTIVATIONS
from rayfin.actors.runner.models.inspect_layers import clamped_gate, gates_plainly
from rayfin.actors.runner.quantized.experts import Expert, QuantExperts, quant_experts
from rayfin.actors.timing import LOAD_LOG_SECONDS
from rayfin.kernels.cpu.codes import CodedMatrix, pack_codes, stack_codes
from rayfin.kernels.cpu.experts import Gate, PackedExperts
from rayfin.kernels.cpu.kernels import CpuKernels, Matrix

logger = logging.getLogger(__name__)

WORKERS = 8
"""Most of the experts that are packed at the same time: each takes memory for its numbers."""

PROBE_ROWS = 4
ROUNDED = 0.1
"""Most of the difference of a row, as a share of it, where rows are rounded to 8 bits."""


class CodedExperts(PackedExpertsModule):
    """Replaces transformers' experts: same arguments, the weights are codes."""

    @property
    def matrices(self) -> list[Matrix]:
        """The weights; plain ones among them are of codes that no kernel reads."""
        return [*self.experts.gate_up, *self.experts.down]

    @property
    def bytes(self) -> int:
        """Of all weights that are codes, without padding."""
        return sum(one.bytes for one in self.matrices if isinstance(one, CodedMatrix))

    @property
    def rounds_rows(self) -> bool:
        """Whether some expert rounds the rows that it multiplies."""
        return any(one.rounds_rows for one in self.matrices if isinstance(one, CodedMatrix))


@torch.inference_mode()
def pack_quantized_experts(
    model: PreTrainedModel, kernels: CpuKernels, *, round_rows: bool = False
) -> int:
    """Replaces experts that are codes, layer after layer; returns the bytes of their weights.

    Experts that compute in another way than the kernels become plain. So do codes that the kernels
    do not read, and a gate and an up projection of unlike codes. ``round_rows`` as ``pack_codes``.
    """
    layers, size, plain, unlike = quant_experts(model), 0, 0, 0
    if not layers:
        return 0
    config = model.config.get_text_config(decoder=True)
    activation: str = getattr(config, "hidden_activation", "") or getattr(config, "hidden_act", "")
    count, logged = len(layers), time.monotonic()
    while layers:
        if time.monotonic() - logged >= LOAD_LOG_SECONDS:
            logged = time.monotonic()
            logger.info("packed the experts of %d of %d layers", count - len(layers), count)
        owner, name, quant = layers.pop()
        usual = ACTIVATIONS.get(activation) if gates_plainly(quant.original) else None
        gate = clamped_gate(quant.original) or usual
        packed = None if gate is None else _packed(kernels, quant, gate, round_rows)
        if packed is None or not _is_equal(packed, quant):
            unlike += 1
            setattr(owner, name, quant.dequantized())
            continue
        size += packed.bytes
        plain += sum(not isinstance(one, CodedMatrix) for one in packed.matrices)
        setattr(owner, name, packed)
    if size:
        logger.info("quantized experts stay in %d MiB", size >> 20)
    if plain:
        why = "no kernel reads their codes, or those of gate and up are unlike"
        logger.warning("%d weights of experts are plain: %s", plain, why)
    if unlike:
        logger.warning("the experts of %d layers are plain: they compute in another way", unlike)
    return size


def experts_round_rows(model: nn.Module) -> bool:
    """Whether some mixture rounds the rows that it multiplies."""
    return any(one.rounds_rows for one in model.modules() if isinstance(one, CodedExperts))


def _packed(kernels: CpuKernels, quant: QuantExperts, gate: Gate, round_rows: bool) -> CodedExperts:
    pack, threads = partial(_packed_expert, kernels, round_rows=round_rows), torch.get_num_threads()
    workers = min(kernels.threads, WORKERS)
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            packed = list(pool.map(pack, quant.experts))
    finally:
        torch.set_num_threads(threads)
    gate_up, down = ([pair[part] for pair in packed] for part in (0, 1))
    return CodedExperts(PackedExperts(kernels, gate_up, down, gate, quant.biases))


def _packed_expert(kernels: CpuKernels, expert: Expert, round_rows: bool) -> tuple[Matrix, Matrix]:
    """The gate above the up projection, and the down projection."""
    gate, up = expert.gate.grouped(), expert.up.grouped()
    gate_up: Matrix | None = None
    coded = [pack_codes(kernels, weight, round_rows=round_rows) for weight in (gate, up)]
    both = [one for one in coded if one is not None]
    # A pair is read in step: it has one order of inputs and one width of codes.
    if len(both) == 2 and both[0].like(both[1]):
        gate_up = stack_codes(kernels, both, paired=True)
    else:
        gate_up = kernels.pack([gate.dense(), up.dense()], paired=True)
    weight = expert.down.grouped()
    down: Matrix | None = pack_codes(kernels, weight, round_rows=round_rows)
    return gate_up, kernels.pack([weight.dense()]) if down is None else down


def _is_equal(packed: CodedExperts, quant: QuantExperts) -> bool:
    """Whether the first and the last expert give what transformers' loop gives."""
    random = torch.Generator().manual_seed(7)
    x = torch.randn(PROBE_ROWS, quant.hidden, generator=random).to(quant.dtype)
    chosen = torch.tensor([[0, len(quant.experts) - 1]]).expand(PROBE_ROWS, 2)
    weights = torch.tensor([[0.75, 0.25]], dtype=quant.dtype).expand(PROBE_ROWS, 2)
    expected, got = quant(x, chosen, weights).float(), packed(x, chosen, weights).float()
    tolerance = ROUNDED if packed.rounds_rows else TOLERANCE[quant.dtype]
    return bool((got - expected).norm() <= tolerance * expected.norm())
