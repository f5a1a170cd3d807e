"""What transformers' loader does with quantised experts that it merges: they become plain."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.core_model_loading import ConversionOps

from rayfin.actors.runner.quantized.formats import Format, Nf4, Nvfp4, mxfp4, refuse
from rayfin.actors.runner.quantized.gguf_blocks import BLOCKS, Gguf

KEYS = ("qweight", "weight_packed", "weight_absmax", "weight_scale_inv", "SCB", *BLOCKS)
"""Tensors that say which format a layer has."""


class DequantizeExperts(ConversionOps):
    """Turns the tensors of each expert's layer into its weight, before experts are merged."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, list[torch.Tensor]]:
        """Lists of tensors, one for each expert, by pattern -> lists of weights."""
        owners: dict[str, dict[str, list[torch.Tensor]]] = {}
        for pattern, tensors in input_dict.items():
            owner, _, leaf = pattern.rpartition(".")
            owners.setdefault(owner, {})[leaf.removesuffix("$")] = list(tensors)
        name, model = kwargs["full_layer_name"], kwargs["model"]
        inputs = model.get_parameter(name).shape[-1]
        weights: dict[str, list[torch.Tensor]] = {}
        for owner, leaves in owners.items():
            key = next(leaf for leaf in leaves if leaf in (*KEYS, "weight"))
            weights[f"{owner}.{key}"] = [
                self._weight(name, one, inputs).to(self.hf_quantizer.dtype) for one in _each(leaves)
            ]
        return weights

    def _weight(self, name: str, tensors: dict[str, torch.Tensor], inputs: int) -> torch.Tensor:
        format: Format = self.hf_quantizer.formats.of(name).as_stored(tensors)
        codes = tensors.get(format.key)
        if codes is None or (format.key == "weight" and codes.dtype.itemsize > 1):
            return tensors["weight"]  # stored exactly
        outputs, inputs = _size(format, tensors, inputs)
        return format.grouped(outputs, inputs, tensors).dense()

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError


def _size(format: Format, tensors: Mapping[str, torch.Tensor], inputs: int) -> tuple[int, int]:
    """Outputs and inputs, from the shapes of tensors; ``inputs`` are those of the merged weight."""
    codes = tensors[format.key]
    if isinstance(format, Gguf):
        return codes.shape[0], inputs
    if isinstance(format, Nf4):
        return 2 * codes.numel() // inputs, inputs
    if isinstance(format, Nvfp4):
        return codes.shape[0], 2 * codes.shape[1]
    if format.key == "weight":
        return codes.shape[0], codes.shape[1]
    if format.key == "weight_packed":
        shape = tensors.get("weight_shape")
        return codes.shape[0], int(shape[1]) if shape is not None else codes.shape[
            1
        ] * 32 // format.bits
    outputs = tensors["scales"].shape[1]
    return outputs, codes.numel() * 32 // format.bits // outputs


def _each(leaves: dict[str, list[torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    count = max(len(tensors) for tensors in leaves.values())
    for index in range(count):
        yield {leaf: tensors[index] for leaf, tensors in leaves.items() if index < len(tensors)}


class Mxfp4Experts(ConversionOps):
    """gpt-oss: blocks and exponents of all experts, [E, outputs, ...] -> [E, inputs, outputs]."""

    def __init__(self, hf_quantizer: Any) -> None:
        self.hf_quantizer = hf_quantizer

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """One tensor for each name, or a list of one."""
        name = kwargs["full_layer_name"]
        tensors = {
            part: value[0] if isinstance(value, list) else value
            for part, value in input_dict.items()
        }
        blocks = next(value for part, value in tensors.items() if part.endswith("_blocks"))
        scales = next((value for part, value in tensors.items() if part.endswith("_scales")), None)
        if scales is None:
            raise refuse(f"the checkpoint lacks {name}_scales")
        weights = [mxfp4(one, some).T for one, some in zip(blocks, scales, strict=True)]
        return {name: torch.stack(weights).to(self.hf_quantizer.dtype).contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError
