"""Experts that stay apart, each in the mapped checkpoint, where transformers would merge them.

A merge copies: the weights of all experts would be in memory before the first one is packed.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
)

PARTS = "rayfin_parts"
"""The attribute of a parameter that stands for experts which are apart."""


class Parts:
    """The weights [E, N, K] of experts; each one's N outputs lie in several tensors, in order."""

    def __init__(self, tensors: list[list[torch.Tensor]]) -> None:
        self.tensors = tensors  # [parts][E], of [n, K]
        outputs = sum(len(experts[0]) for experts in tensors)
        self.shape = torch.Size((len(tensors[0]), outputs, tensors[0][0].shape[1]))
        self.dtype = tensors[0][0].dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """As of the merged weights; that of one expert copies no other."""
        if isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype == torch.int64:
            index = int(index)
        if type(index) is not int:
            return self.merged()[index]
        parts = [experts[index] for experts in self.tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def merged(self) -> torch.Tensor:
        """A copy of all of them."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        first = 0
        for experts in self.tensors:
            for index, expert in enumerate(experts):
                whole[index, first : first + len(expert)] = expert
            first += len(experts[0])
        return whole

    def each(self) -> Iterator[torch.Tensor]:
        """Every tensor."""
        for experts in self.tensors:
            yield from experts


class Apart(ConversionOps):
    """In place of a merge: gives a parameter of the merged shape, which has the ``Parts``.

    Args:
        merges: what transformers would do; it is done where experts are not alike.
        dtypes: of tensors that may stay apart.
    """

    def __init__(self, merges: list[ConversionOps], dtypes: tuple[torch.dtype, ...]) -> None:
        self.merges, self.dtypes = merges, dtypes

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Lists of tensors, one for each expert, by pattern -> the parameter."""
        lists = [input_dict[pattern] for pattern in source_patterns if pattern in input_dict]
        if not self._are_alike(lists) or len(target_patterns) != 1:
            for merge in self.merges:
                input_dict = merge.convert(
                    input_dict,
                    source_patterns=source_patterns,
                    target_patterns=target_patterns,
                    **kwargs,
                )
            return input_dict
        parts = Parts([list(tensors) for tensors in lists])
        shown = torch.empty(1, dtype=parts.dtype).expand(parts.shape)
        standing = nn.Parameter(shown, requires_grad=False)
        setattr(standing, PARTS, parts)
        return {target_patterns[0]: standing}

    def _are_alike(self, lists: Sequence[Any]) -> bool:
        """Whether the experts have the same shapes in each list, and as many inputs in all."""
        if len(lists) != 1 and len(self.merges) < 2:
            return False
        if not all(isinstance(tensors, list) and tensors for tensors in lists):
            return False
        firsts = [tensors[0] for tensors in lists]
        return (
            len({len(tensors) for tensors in lists}) == 1
            and len({one.dtype for tensors in lists for one in tensors}) == 1
            and firsts[0].dtype in self.dtypes
            and all(one.dim() == 2 for one in firsts)
            and len({one.shape[1] for one in firsts}) == 1
            and all(
                one.shape == first.shape
                for tensors, first in zip(lists, firsts, strict=True)
                for one in tensors
            )
        )

    @property
    def reverse_op(self) -> ConversionOps:
        """Only a save needs it, and nothing that is loaded here is saved."""
        raise NotImplementedError


def kept_apart(mapping: Iterable[Any], dtypes: tuple[torch.dtype, ...]) -> list[Any]:
    """transformers' conversions of a checkpoint, without the merges of experts.

    Args:
        dtypes: of tensors that may stay apart.
    """
    return [_kept_apart(conversion, dtypes) for conversion in mapping]


def _kept_apart(conversion: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
    if type(conversion) is not WeightConverter or not _merges(conversion.operations):
        return conversion
    changed = copy.copy(conversion)
    changed.operations = [Apart(conversion.operations, dtypes)]
    return changed


def _merges(operations: Sequence[ConversionOps]) -> bool:
    """Whether they stack experts, and perhaps put one projection's outputs behind another's."""
    kinds = [type(operation) for operation in operations]
    dims = [getattr(operation, "dim", None) for operation in operations]
    return (kinds, dims) in (
        ([MergeModulelist], [0]),
        ([MergeModulelist, Concatenate], [0, 1]),
    )
