"""Streams a quantised checkpoint through transformers' own loader.

transformers reads files, renames keys, merges experts and ties weights; this quantizer gives it
modules whose buffers have the names that the checkpoint has. Experts, which have no module for each
one, stay in the files where they are to be packed (experts.py), or are dequantised while they are
merged.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from rayfin.actors.errors import InvalidConfig
from rayfin.actors.model_files.shards import Shards, read_header
from rayfin.actors.runner.quantized.config import Formats, read_formats, source_config
from rayfin.actors.runner.quantized.conversions import KEYS, DequantizeExperts, Mxfp4Experts
from rayfin.actors.runner.quantized.experts import (
    CodedProjection,
    ExactLayer,
    Expert,
    StoredLayer,
    TensorFiles,
    TensorPlace,
    expert_names,
    quant_experts,
)
from rayfin.actors.runner.quantized.formats import Format, Slot, refuse
from rayfin.actors.runner.quantized.linear import (
    HeadEmbedding,
    QuantEmbedding,
    QuantLinear,
    ScaledEmbedding,
    embedding_scale,
)
from rayfin.actors.runner.quantized.mxfp4 import coded_experts, mxfp4_experts

logger = logging.getLogger(__name__)

METHOD = "rayfin"
RENAMED = r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map)$"
SAFETENSORS = {
    **{"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "U8": torch.uint8},
    **{"I32": torch.int32, "I64": torch.int64, "I16": torch.int16, "BOOL": torch.bool},
}

Stored = dict[str, tuple[torch.dtype | None, tuple[int, ...]]]


def prepare(config: PretrainedConfig, *, experts_on: torch.device | None = None) -> None:
    """Makes transformers load a model of this configuration by the quantizer here.

    Args:
        experts_on: leaves experts that are quantised as they are (``QuantExperts``), and makes
            their numbers on this device; None dequantises them.

    Raises:
        InvalidConfig: The checkpoint's format is not served.
    """
    source = source_config(config)
    if source is None or source.get("quant_method") == METHOD:
        return
    read_formats(source)
    _register()
    plain(config)
    config.quantization_config = {
        **{"quant_method": METHOD, "source": source},
        "experts_on": None if experts_on is None else str(experts_on),
    }


def plain(config: PretrainedConfig) -> None:
    """Forgets the checkpoint's format."""
    for one in (config, config.get_text_config(decoder=True)):
        if hasattr(one, "quantization_config"):
            del one.quantization_config


def _register() -> None:
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantizer(METHOD)(Quantizer)
    if METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(METHOD)(QuantizerConfig)


def quantizer_of(config: PretrainedConfig) -> "Quantizer | None":
    """What reads a quantised checkpoint's layers one by one, or None if it is plain.

    The configuration forgets the format: what is made of it has plain layers.

    Raises:
        InvalidConfig: The checkpoint's format is not served.
    """
    source = source_config(config)
    plain(config)
    return None if source is None else Quantizer(QuantizerConfig(source))


class QuantizerConfig(QuantizationConfigMixin):
    """Carries the checkpoint's own configuration to ``Quantizer``."""

    def __init__(
        self,
        source: dict[str, Any],
        quant_method: str = METHOD,
        experts_on: str | None = None,
        **_: Any,
    ) -> None:
        self.quant_method: Any = quant_method
        self.source, self.experts_on = source, experts_on


class StoredCodes(NamedTuple):
    """What a checkpoint has in codes, by the names in the model."""

    linear: dict[str, StoredLayer]
    experts: dict[str, list[Expert]]
    tables: dict[str, StoredLayer]  # of embeddings


class Quantizer(HfQuantizer):
    """Replaces the layers that the checkpoint stores quantised by ``QuantLinear``."""

    requires_calibration = False
    is_trainable = False

    def __init__(self, quantization_config: QuantizerConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.formats = read_formats(quantization_config.source)
        self.dtype = torch.float32  # of the model; set before weights are loaded
        self._experts_on = quantization_config.experts_on
        self._places: dict[str, dict[str, TensorPlace]] = {}  # of the tensors of each module
        if self.formats.experts == "mxfp4":
            parts = ("gate_up_proj", "down_proj")
            self.serialized_names = {one: [f"{one}_blocks", f"{one}_scales"] for one in parts}
        else:
            outputs, inputs = ANY_SIZE
            shapes = self.formats.default.slots(outputs, inputs, dict.fromkeys(OPTIONAL, ()))
            names = [*shapes, "weight", *SCALES_OF_ROWS, "weight_zero_point"]
            self.serialized_names = {"weight": list(dict.fromkeys(names))}

    def is_serializable(self) -> bool:
        return False

    def get_load_operations(self) -> dict[str, type[ConversionOps]]:
        """Experts are dequantised before transformers merges them."""
        return {"dequantize": Mxfp4Experts if self.formats.experts else DequantizeExperts}

    def get_weight_conversions(self) -> list[Any]:
        """None for plain layers: their tensors load as they are. MXFP4 has experts only."""
        if not self.formats.experts:
            return []
        return [
            WeightConverter(names, name, [Mxfp4Experts(self)])
            for name, names in self.serialized_names.items()
        ]

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel
    ) -> list[Any]:
        """Names without dots first, as buffers want them (bitsandbytes).

        Codes that the embedding shares with a head lie under its name, and become the head's.
        """
        renamings = list[WeightRenaming]()
        if self.formats.method == "bitsandbytes":
            renamings = [
                WeightRenaming(RENAMED, r".weight_\1"),
                WeightRenaming(r"\.weight\.quant_state\..*$", ".weight_quant_state"),
            ]
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if self.formats.tied and head is not None:
            names = {id(module): name for name, module in model.named_modules()}
            table, head_name = names[id(model.get_input_embeddings())], names[id(head)]
            renamings = [WeightRenaming(rf"^{re.escape(table)}\.", f"{head_name}.")]
        rest: list[Any] = super().update_weight_conversions(weight_conversions, model)  # type: ignore[no-untyped-call]
        return [*renamings, *rest]

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] = (), **_: Any
    ) -> None:
        layers = self._stored_layers(model, checkpoint_files)
        self._require_whole_experts(layers)
        dtype = self.dtype = model.dtype
        files, experts = TensorFiles(torch.device(self._experts_on or "cpu")), {}
        if self._experts_on is not None:
            experts = self._stored_experts(model, layers, files)
        count = _leave_experts(model, experts, files.device)
        for name, module in list(model.named_modules()):
            if type(module) not in (nn.Linear, Conv1D) or name not in layers:
                continue
            stored = layers[name]
            if (format := self._format_of(name, stored)) is None:
                continue
            owner, _, leaf = name.rpartition(".")
            setattr(
                model.get_submodule(owner), leaf, quant_linear(name, module, format, stored, dtype)
            )
            count += 1
        count += self._replace_embedding(model, layers)
        if not count and not self.formats.experts:
            if not any(".experts." in name for name in layers):
                raise self._none()
        self._places.clear()
        logger.info("%d layers of %s", count, self.formats.default.label)

    def stored(
        self, model: PreTrainedModel, checkpoint_files: Sequence[Path], device: torch.device
    ) -> StoredCodes:
        """The layers of a model that are in codes, each to be read by itself.

        Args:
            model: without weights.
            device: where their numbers are made.

        Raises:
            InvalidConfig: As ``prepare`` and ``checked_slots``; or no layer is in codes.
        """
        layers = self._stored_layers(model, checkpoint_files)
        self._require_whole_experts(layers)
        files, linear = TensorFiles(device), dict[str, StoredLayer]()
        for name, module in model.named_modules():
            if type(module) in (nn.Linear, Conv1D) and name in layers:
                if layer := self._stored_layer(name, *_sizes(module), layers, files):
                    linear[name] = layer
        experts = self._stored_experts(model, layers, files, mixed=True)
        if not linear and not experts:
            raise self._none()
        count = len(linear) + 3 * sum(map(len, experts.values()))
        logger.info("%d layers of %s", count, self.formats.default.label)
        return StoredCodes(linear, experts, self._stored_table(model, layers, files, linear))

    def _replace_embedding(self, model: PreTrainedModel, layers: Mapping[str, Stored]) -> int:
        """Replaces an embedding of codes; returns 1 if they are not the head's."""
        embedding: Any = model.get_input_embeddings()
        output: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        head = output if self.formats.tied else None
        name = next((name for name, one in model.named_modules() if one is embedding), "")
        stored = layers.get(name, {})
        owner, _, leaf = name.rpartition(".")
        if (scale := embedding_scale(embedding)) is None:
            return 0
        if isinstance(head, QuantLinear):
            setattr(model.get_submodule(owner), leaf, HeadEmbedding(head, scale))
            return 0
        if (format := self._format_of(name, stored)) is None:
            return 0
        table: torch.Tensor = embedding.weight
        outputs, inputs = table.shape
        slots = checked_slots(name, outputs, inputs, format, stored)
        quantized = QuantEmbedding(name, outputs, inputs, format, slots, table.device, self.dtype)
        quantized.scale = scale
        setattr(model.get_submodule(owner), leaf, quantized)
        return 1

    def _stored_table(
        self,
        model: PreTrainedModel,
        layers: Mapping[str, Stored],
        files: TensorFiles,
        linear: Mapping[str, StoredLayer],
    ) -> dict[str, StoredLayer]:
        """The embedding's table by its name, if it is in codes."""
        embedding: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        names = {id(module): name for name, module in model.named_modules()}
        name = names[id(embedding)]
        if self.formats.tied and (stored := linear.get(names.get(id(head), ""))) is not None:
            return {name: stored}
        outputs, inputs = embedding.weight.shape
        layer = self._stored_layer(name, outputs, inputs, layers, files) if name in layers else None
        return {} if layer is None else {name: layer}

    def _none(self) -> InvalidConfig:
        method = self.formats.method
        return refuse(f"quantization_config names {method!r}, and the checkpoint has no such layer")

    def _stored_experts(
        self,
        model: PreTrainedModel,
        layers: Mapping[str, Stored],
        files: TensorFiles,
        *,
        mixed: bool = False,
    ) -> dict[str, list[Expert]]:
        """The experts whose layers are all quantised, or with ``mixed`` some of them, by module."""
        by_path = dict[str, list[Expert]]()
        for path, names in expert_names(model, layers).items():
            module = model.get_submodule(path)
            hidden, inner = module.get_parameter("down_proj").shape[1:]
            shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
            experts, exact = list[Expert](), 0
            for number in range(len(names.down)):
                parts = list[CodedProjection]()
                for part, shape in zip(names, shapes, strict=True):
                    name = part[number]
                    layer = self._stored_layer(name, *shape, layers, files)
                    exact += layer is None
                    parts.append(layer or ExactLayer(*shape, self._places[name]["weight"], files))
                experts.append(Expert(*parts))
            if exact < 3 * len(experts) if mixed else not exact:
                by_path[path] = experts
        if self.formats.experts == "mxfp4":
            by_path |= mxfp4_experts(model, layers, self._places, files)
        return by_path

    def _stored_layer(
        self,
        name: str,
        outputs: int,
        inputs: int,
        layers: Mapping[str, Stored],
        files: TensorFiles,
    ) -> StoredLayer | None:
        """The layer, or None if it is stored exactly."""
        if (format := self._format_of(name, layers[name])) is None:
            return None
        slots = checked_slots(name, outputs, inputs, format, layers[name])
        return StoredLayer(name, outputs, inputs, format, slots, self._places[name], files)

    def _require_whole_experts(self, layers: Mapping[str, Stored]) -> None:
        """Raises where an expert lacks a tensor: transformers would not name it."""
        for name, stored in layers.items():
            if self.formats.experts:
                lacking = [
                    f"{leaf.removesuffix('_blocks')}_scales"
                    for leaf in stored
                    if leaf.endswith("_blocks")
                ]
            elif ".experts." in name and (format := self._format_of(name, stored)) is not None:
                optional: dict[str, tuple[int, ...]] = {}
                lacking = list(format.slots(*ANY_SIZE, optional))
            else:
                continue
            for leaf in lacking:
                if leaf not in stored:
                    raise refuse(f"the checkpoint lacks {name}.{leaf}, which its experts need")

    def _format_of(self, name: str, stored: Stored) -> Format | None:
        """The format of a layer, or None if it is stored exactly."""
        format = self.formats.of(name).as_stored(stored)
        foreign = [key for key in KEYS if key in stored and key not in _names_of(format)]
        if foreign:
            raise refuse(
                f"the checkpoint's {name}.{foreign[0]} is not of the format {format.label!r}"
            )
        weight = stored.get("weight")
        exact = weight is not None and weight[0] in (torch.float32, torch.float16, torch.bfloat16)
        if exact or not set(stored) & _names_of(format) or self.formats.experts:
            return None
        return format

    def _stored_layers(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str | Path]
    ) -> dict[str, Stored]:
        """The tensors of each module, under the module's name in the model."""
        renamings = [
            entry
            for entry in get_model_conversion_mapping(model, None, self)
            if isinstance(entry, WeightRenaming)
        ]
        state = model.state_dict()
        layers: dict[str, Stored] = {}
        names = {name for name, _ in model.named_modules()}
        prefix = f"{model.base_model_prefix}."
        for place, entry in stored_tensors(checkpoint_files or ()):
            renamed, _ = rename_source_key(place.key, renamings, [], model.base_model_prefix, state)
            owner, _, leaf = renamed.rpartition(".")
            if owner not in names and prefix + owner in names:
                owner = prefix + owner
            elif owner not in names and owner.removeprefix(prefix) in names:
                owner = owner.removeprefix(prefix)
            layers.setdefault(owner, {})[leaf] = entry
            self._places.setdefault(owner, {})[leaf] = place
        return layers


def _leave_experts(
    model: PreTrainedModel, experts: Mapping[str, list[Expert]], device: torch.device
) -> int:
    """Takes experts out of a model that is about to be loaded; returns the number of layers."""
    ignored = {UNREAD, *(model._keys_to_ignore_on_load_unexpected or ())}
    for path, module_experts in experts.items():
        coded = coded_experts(model.get_submodule(path), module_experts, model.dtype, device)
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, coded)
        ignored.add(rf"\.{re.escape(leaf)}\.")
    model._keys_to_ignore_on_load_unexpected = ignored
    return 3 * sum(map(len, experts.values()))


def _names_of(format: Format) -> set[str]:
    optional: dict[str, tuple[int, ...]] = {name: () for name in OPTIONAL}
    return set(format.slots(*ANY_SIZE, optional)) - {"weight"} | {format.key}


ANY_SIZE = (256, 256)
"""Outputs and inputs that a layer of any format may have."""

SCALES_OF_ROWS = ("input_scale", "input_global_scale")
"""Tensors of layers whose rows another server rounds, which are not read."""

UNREAD = rf"\.({'|'.join((*SCALES_OF_ROWS, 'k_scale', 'v_scale'))})$"
"""Those of pages, too: transformers need not warn of them."""

OPTIONAL = ("g_idx", "weight_shape", "weight_g_idx", "weight_nested_absmax")


def quant_linear(
    name: str, module: nn.Module, format: Format, stored: Stored, dtype: torch.dtype
) -> QuantLinear:
    """The layer that reads these tensors in place of ``module``.

    Raises:
        InvalidConfig: As ``checked_slots``.
    """
    outputs, inputs = _sizes(module)
    checked = checked_slots(name, outputs, inputs, format, stored)
    bias = module.bias
    assert bias is None or isinstance(bias, torch.Tensor)
    return QuantLinear(name, outputs, inputs, format, checked, bias, dtype)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    outputs, inputs = module.get_parameter("weight").shape
    return (inputs, outputs) if isinstance(module, Conv1D) else (outputs, inputs)


def checked_slots(
    name: str, outputs: int, inputs: int, format: Format, stored: Stored
) -> dict[str, tuple[Slot, tuple[int, ...]]]:
    """The tensors of a layer, with the shapes that they are stored in.

    Raises:
        InvalidConfig: A tensor is missing, or has another shape or type than the format wants.
    """
    shapes = {leaf: shape for leaf, (_, shape) in stored.items()}
    try:
        slots = format.slots(outputs, inputs, shapes)
    except (InvalidConfig, ValueError) as error:
        raise refuse(f"the checkpoint's {name}: {error}") from None
    checked: dict[str, tuple[Slot, tuple[int, ...]]] = {}
    for leaf, slot in slots.items():
        if leaf not in stored:
            raise refuse(
                f"the checkpoint lacks {name}.{leaf}, which its {format.method} layers need"
            )
        kind, shape = stored[leaf]
        wanted = tuple(shape[i] if n is None else n for i, n in enumerate(slot.shape))
        if len(shape) != len(slot.shape) or shape != wanted:
            want = [n if n is not None else "any" for n in slot.shape]
            raise refuse(
                f"the checkpoint's {name}.{leaf} has shape {list(shape)}, and a layer of "
                f"{format.label} with {outputs} outputs and {inputs} inputs wants {want}"
            )
        floats = kind is not None and kind.is_floating_point and kind.itemsize > 1
        if not (floats if slot.dtype == torch.float32 else kind == slot.dtype):
            raise refuse(
                f"the checkpoint's {name}.{leaf} holds {_word(kind)}, and {format.method} wants "
                f"{_word(slot.dtype)}"
            )
        checked[leaf] = slot, shape
    return checked


def _word(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def stored_tensors(
    files: Sequence[str | Path],
) -> Iterator[tuple[TensorPlace, tuple[torch.dtype | None, tuple[int, ...]]]]:
    """Place, type and shape of each tensor of a checkpoint's safetensors files."""
    shards = Shards(files)
    for path in map(Path, files):
        if path.suffix != ".safetensors":
            continue
        for name, entry in read_header(path).items():
            if shards.counts(name, path):
                kind = SAFETENSORS.get(entry["dtype"])
                yield TensorPlace(path, name), (kind, tuple(entry["shape"]))


def quant_embeddings(
    model: nn.Module,
) -> list[tuple[nn.Module, str, QuantEmbedding | HeadEmbedding]]:
    """Owner, attribute and module of every embedding of codes."""
    return [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, QuantEmbedding | HeadEmbedding)
    ]


def quant_linears(model: nn.Module) -> list[tuple[nn.Module, str, QuantLinear]]:
    """Owner, attribute and layer of every quantised layer."""
    return [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, QuantLinear)
    ]


def dequantize(model: nn.Module) -> list[nn.Linear]:
    """Replaces the quantised layers by plain ones, one after the other; returns the linear ones."""
    experts = quant_experts(model)
    while experts:
        owner, name, mixture = experts.pop()
        setattr(owner, name, mixture.dequantized())
    embeddings, layers, linears = quant_embeddings(model), quant_linears(model), []
    plain: dict[int, torch.Tensor] = {}  # the weights of tables that several modules read
    tables = {id(one.table) for _, _, one in embeddings}
    while layers:
        owner, name, layer = layers.pop()
        linears.append(layer.dequantized())
        if id(layer) in tables:
            plain[id(layer)] = linears[-1].weight.detach()
        setattr(owner, name, linears[-1])
    for owner, name, one in embeddings:
        weight = plain.get(id(one.table))
        if weight is None:
            weight = one.table.weight_in(one.table.dtype)
        setattr(owner, name, ScaledEmbedding(weight, one.scale))
    return linears


def formats_of(model: PreTrainedModel) -> Formats | None:
    """The formats of the checkpoint that the model was loaded from."""
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer.formats if isinstance(quantizer, Quantizer) else None
