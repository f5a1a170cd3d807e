"""Reads a model's checkpoint, compares it with transformers, and puts it on its kernels.

``loading.py`` imports this module where it is needed: it brings transformers' modelling code, which
takes seconds to import and which a start from packed weights does without.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, RayfinError, UnsupportedModel
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.runner.cpu.build_decoder import TOLERANCE, build_cpu_decoder
from rayfin.actors.runner.cpu.coded_experts import experts_round_rows, pack_quantized_experts
from rayfin.actors.runner.cpu.decoder import CpuDecoder
from rayfin.actors.runner.cpu.packed_layers import has_products, pack_linears
from rayfin.actors.runner.cpu.recurrent_rows import fuse_recurrent
from rayfin.actors.runner.loading import LoadedModel, cpu_kernels, reads_states
from rayfin.actors.runner.models.compare import require_equal
from rayfin.actors.runner.models.dtypes import page_type
from rayfin.actors.runner.models.indexer import inside_indexers
from rayfin.actors.runner.models.mapped_weights import widen
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.models.weights import load_model
from rayfin.actors.runner.parallel.groups import ProcessGroups
from rayfin.actors.runner.parallel.rank import ParallelRank
from rayfin.actors.runner.parallel.shard_weights import load_share
from rayfin.actors.runner.parts.model_part import Decoder, ModelPart, Weights
from rayfin.actors.runner.parts.registry import load_whole, parts_around, read_with_parts
from rayfin.actors.runner.quantized.loader import dequantize, formats_of
from rayfin.actors.runner.quantized.packed import (
    int4_saves,
    pack_quantized,
    quantized_parameters,
    rounds_rows,
)
from rayfin.actors.settings.choices import Quantization
from rayfin.actors.timing import MODEL_LOAD_SECONDS
from rayfin.kernels.attention.select import (
    ON_TRITON,
    SeeingAhead,
    page_types,
    select_attention,
    why_refused,
)
from rayfin.kernels.cpu.kernels import CpuKernels
from rayfin.kernels.shapes import PagedAttention
from rayfin.kernels.triton.available import can_use_triton

if TYPE_CHECKING:
    from rayfin.actors.runner.gpu.prompt_graphs import Recordable

logger = logging.getLogger(__name__)

EXACT_ROWS = (
    "rows are multiplied exactly; --activations int8 rounds them to 8 bits, as llama.cpp does: one "
    "stream is about 1.5 times as fast"
)
"""For the log, of a GGUF file: who has one may compare."""


NO_FLA = (
    "prompts of layers that keep states run on torch's operations: pip install 'rayfin[hybrid]' "
    "brings Triton kernels for them"
)

ROUNDED = {
    "int8": "integers, on the compiled CPU kernels, and {} has no such layer; plain "
    "weights: quantization 'int4'",
    "fp8": "fp8 with a scale for each output, layer or block of 128 x 128, on the Triton kernels "
    "of a GPU in 16 bits, and {} has no such layer, or the GPU no such product",
}
"""What layers round their rows, by ``activations``."""


def load_checkpoint(
    args: EngineArgs,
    config: PretrainedConfig,
    device: torch.device,
    place: ParallelRank | None,
    recipe: PoolingRecipe | None,
) -> LoadedModel:
    """Reads the checkpoint, and puts the model on its kernels."""
    if (loaded := load_whole(args, config, device, recipe)) is not None:
        _require_rounding(args, None)
        return loaded
    ranks = 1 if place is None else place.size
    rounded = None if args.quantization == "dequantize" else args.quantization
    rounds = rounded is not None or args.activations != "exact"
    peers = None if place is None else ProcessGroups(place, device)
    stored = config.dtype
    weights = _load_weights(args, config, device, peers, recipe)
    model, parts = weights.model, list(weights.parts)
    kernels, parameters = None, _parameters(model)
    if device.type == "cpu":
        kernels = cpu_kernels(args, parameters, ranks)
        if kernels and model.dtype in TOLERANCE:
            _pack_codes(args, model, kernels)
    on_triton = _uses_triton(args, device) and all(part.samples for part in parts)
    if on_triton and not parts:
        _pack_for_triton(model, rounded, round_rows=args.activations == "fp8")
    if not kernels:
        widen(model)
    dequantize(weights.whole)  # what has no kernel
    _require_rounding(args, model)
    saves = int4_saves(model, stored) if kernels and args.quantization is None else 0
    kernel = causal = _attention(args, device, model.dtype, kernels)
    if device.type == "cuda" and any(part.sees_ahead for part in parts):
        kernel = SeeingAhead(causal)
    pages = page_type(args.kv_cache_dtype, model.dtype, kernel)
    parts += parts_around(args, model, rounds)
    paged = _page(weights, kernel, args.page_size)
    _require_prefill(args, causal, pages)
    if peers is not None and paged.recurrent is not None:
        name = type(model).__name__
        raise UnsupportedModel(f"{name} cannot be shared: its layers keep states", "model")
    decoder = Decoder(paged, kernels, rounds)
    for part in parts:
        part.over(decoder)
    step_model: StepModel = paged
    gpu_model: Recordable | None = None
    if on_triton:
        gpu_model = _on_triton(paged, causal, args, parts, peers)
        step_model = gpu_model or paged
    if kernels and model.dtype in TOLERANCE:
        step_model = on_cpu_kernels(paged, kernels, rounded, parts, whole=not peers)
    wrapped = _wrapped(step_model, parts, decoder, None if place or recipe else config)
    return LoadedModel(
        *(device, config, wrapped, gpu_model, pages, kernels, peers, paged.recurrent),
        parts=tuple(parts),
        page_types=tuple(page_types(kernel)),
        int4_saves=saves,
        parameters=parameters,
        chooses_keys=bool(inside_indexers(model)),
        decoder=step_model,
    )


def _wrapped(
    model: StepModel,
    parts: Sequence[ModelPart],
    decoder: Decoder,
    config: PretrainedConfig | None,
) -> StepModel:
    """The model with all parts around it, the inner ones first.

    Args:
        config: of a whole model whose logits become tokens.
    """
    if config is not None:
        decoder.paged.pad_logits(config.get_text_config(decoder=True).vocab_size)
    for part in parts:
        model = part.wrap(model, decoder)
    return model


def _load_weights(
    args: EngineArgs,
    config: PretrainedConfig,
    device: torch.device,
    peers: ProcessGroups | None,
    recipe: PoolingRecipe | None,
) -> Weights:
    """Reads the decoder, or this rank's share of it."""
    if (weights := read_with_parts(args, config, device, recipe)) is not None:
        return weights
    keep = args.quantization != "dequantize"
    if peers is None:
        model: Any = load_model(args, config, device, ATTENTION, keep_quantized=keep, narrow=True)
        return Weights(model, model)
    model = load_share(args, config, device, ATTENTION, peers, keep_quantized=keep)
    peers.connect("load", MODEL_LOAD_SECONDS)
    total = config.get_text_config(decoder=True).num_hidden_layers
    return Weights(model, model, layers=peers.place.layers(total))


def _attention(
    args: EngineArgs, device: torch.device, dtype: torch.dtype, kernels: CpuKernels | None
) -> PagedAttention:
    try:
        return select_attention(device, dtype, args.attention, kernels)
    except ValueError as error:
        raise InvalidConfig(str(error), "attention") from None


def _page(weights: Weights, kernel: PagedAttention, page_size: int) -> PagedModel:
    """The model over pages, compared with transformers unless it is a rank's share.

    Raises:
        UnsupportedModel: it cannot be served.
    """
    model: PreTrainedModel = weights.model
    try:
        paged = PagedModel(model, kernel, weights.layers)
        if weights.layers is None and weights.compared:
            require_equal(paged, page_size)
        _suggest_kernels(paged, paged.device)
        return paged
    except (RayfinError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever a model's own code raises over pages
        lines = str(error).strip().splitlines() or [""]
        why = f"over pages its forward raises {type(error).__name__}: {lines[0]}"
        config = model.config.get_text_config(decoder=True)
        if getattr(config, "indexer_budget", None):
            why = "its sparse attention keeps an index of keys beside the pages"
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be served: {why}", "model"
        ) from error


def _suggest_kernels(paged: PagedModel, device: torch.device) -> None:
    if device.type == "cuda" and paged.recurrent is not None and paged.recurrent.lacks_kernels:
        logger.info(NO_FLA)


def _uses_triton(args: EngineArgs, device: torch.device) -> bool:
    return args.attention in ON_TRITON and can_use_triton(device)


def _require_prefill(args: EngineArgs, attention: PagedAttention, pages: torch.dtype) -> None:
    """Refuses a kernel for prompts that was asked for by name and takes no layer of the model."""
    why = why_refused(attention)
    if pages.itemsize == 1:  # the comparison at load has pages of the model's own dtype
        why = why or f"it does not read pages of {pages}"
    if args.attention == "fa3" and why:
        raise InvalidConfig(f"attention 'fa3' cannot be used: {why}", "attention")


def _pack_for_triton(
    model: PreTrainedModel, rounded: Quantization | None, *, round_rows: bool
) -> None:
    """Puts quantised layers and experts on Triton's kernels, or rounds plain layers."""
    from rayfin.actors.runner.gpu.experts import pack_experts
    from rayfin.actors.runner.gpu.quant_linear import pack_quantized as pack
    from rayfin.actors.runner.gpu.quant_linear import round_linears

    pack(model, round_rows=round_rows)
    pack_experts(model)
    if rounded and not round_linears(model, 4 if rounded == "int4" else 8):
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be quantised: it has no plain layers", "quantization"
        )


def _on_triton(
    paged: PagedModel,
    attention: PagedAttention,
    args: EngineArgs,
    parts: Sequence[ModelPart],
    peers: ProcessGroups | None,
) -> "Recordable | None":
    """Puts the experts on Triton's kernels, and all of the model, or a rank's share of its layers,
    if it is recognized.

    Returns:
        What CUDA graphs can record; None of a stage of a pipeline, and if it cannot be recorded.
    """
    from rayfin.actors.runner.gpu.decoder import build_gpu_decoder  # Triton is not everywhere
    from rayfin.actors.runner.gpu.experts import group_experts
    from rayfin.actors.runner.gpu.graph_model import build_graph_model
    from rayfin.actors.runner.gpu.routers import fuse_routers

    group_experts(paged, args.page_size, bool if peers is None else peers.all_agree)
    if peers is None:  # a rank that stays with its module might choose another expert
        fuse_routers(paged.transformer, paged.dtype)
    elif peers.place.stages > 1:
        return None
    fold = not any(part.hooks_layers for part in parts)
    decoder = None
    if not reads_states(args):  # whose hooks see modules
        decoder = build_gpu_decoder(paged, attention, args.page_size, fold=fold, peers=peers)
    if decoder is not None or args.enforce_eager:
        return decoder
    return build_graph_model(paged, attention, args.page_size, peers)


def on_cpu_kernels(
    paged: PagedModel,
    kernels: CpuKernels,
    quantization: Quantization | None,
    parts: Sequence[ModelPart] = (),
    *,
    whole: bool = True,
) -> PagedModel | CpuDecoder:
    """The model with all of it, or its linear layers, on compiled kernels.

    It is not ``whole`` if it is a rank's share: then it is the linear layers and experts.
    """
    if whole and all(part.takes(None) for part in parts):
        decoder = build_cpu_decoder(paged, kernels, quantization)
        if decoder and all(part.takes(decoder) for part in parts):
            torch.set_num_threads(1)  # little is left to torch, whose threads would be in the way
            return decoder
        del decoder
    fuse_recurrent(paged, kernels)
    hooked = any(part.hooks_layers for part in parts)
    packed = pack_linears(paged, kernels, quantization, parts=whole and not hooked)
    fused = packed and paged.recurrent is not None and paged.recurrent.is_fused
    if fused and not hooked and not has_products(paged.transformer):
        torch.set_num_threads(1)  # likewise: its idle threads would keep cores from the kernels'
    if quantization and not packed:
        name = type(paged.transformer).__name__
        raise UnsupportedModel(
            f"{name} cannot be quantised: it reads its weights for itself", "quantization"
        )
    widen(paged.transformer)
    return paged


def _pack_codes(args: EngineArgs, model: PreTrainedModel, kernels: CpuKernels) -> None:
    """Puts the layers and experts of a quantized checkpoint on the kernels."""
    round_rows, formats = args.activations == "int8", formats_of(model)
    pack_quantized(model, kernels, round_rows=round_rows)
    if formats is not None and formats.method == "gguf" and not round_rows:
        logger.info(EXACT_ROWS)
    pack_quantized_experts(model, kernels, round_rows=round_rows)


def _parameters(model: PreTrainedModel) -> int:
    return int(model.num_parameters()) + quantized_parameters(model)


def _require_rounding(args: EngineArgs, model: PreTrainedModel | None) -> None:
    """Refuses ``activations`` that round rows where no layer does; None has no such layers."""
    rounds = model is not None and (rounds_rows(model) or experts_round_rows(model))
    if args.activations in ROUNDED and not rounds:
        raise InvalidConfig(
            f"activations {args.activations!r} is for weights of a quantized checkpoint that are "
            f"{ROUNDED[args.activations].format(args.model)}",
            "activations",
        )
